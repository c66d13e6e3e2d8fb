/** "Compile Model here" in the menus of nodes and links: one node, where the user points. */
import { app } from "../../../scripts/app.js";
import { inOneStep, insert, linkOf } from "./graph_edit.js";
import { isOurs, KINDS, tellOf } from "./make_faster.js";
import { words } from "./words.js";

/** How near to a link's middle one must be, in the canvas' pixels. */
const NEAR = 15;

/** By the type of what is compiled. */
const TYPES = { MODEL: "model", VAE: "vae" };

/**
 * @param {any} graph
 * @param {any[]} ids of links that come from the same place
 * @param {string} type
 * @returns {any[]} the menu's entry; none where all of them are served by a node of ours
 */
function entryFor(graph, ids, type) {
  const kind = TYPES[type];
  const links = ids.map((id) => linkOf(graph, id)).filter(Boolean);
  const open = links.filter(
    ({ origin_id, target_id }) =>
      !isOurs(graph.getNodeById(origin_id)) && !isOurs(graph.getNodeById(target_id)),
  );
  if (!kind || !open.length) return [];
  const callback = () => tellOf([inOneStep(() => insert(graph, KINDS[kind], open))]);
  return [{ content: words(`page.compile_${kind}_here`), callback }];
}

/**
 * Behind what gives a model or a VAE, else before what takes one.
 * @param {any} node
 */
export function nodeEntries(node) {
  if (isOurs(node) || !node?.graph) return [];
  return Object.keys(TYPES).flatMap((type) => {
    const given = (node.outputs ?? []).filter((output) => output.type === type);
    const taken = (node.inputs ?? []).filter((input) => input.type === type);
    const ids = given.length ? given.map(({ links }) => links ?? []) : taken.map(({ link }) => [link]);
    return ids.flatMap((each) => entryFor(node.graph, each, type)).slice(0, 1);
  });
}

/** @param {any} canvas whether the pointer is on this part of a link @param {any} part */
function isPointedAt(canvas, part) {
  const [x, y] = canvas.graph_mouse;
  if (part._pos && Math.hypot(part._pos[0] - x, part._pos[1] - y) < NEAR) return true;
  return false;
}

/**
 * Of the link under the pointer.
 * @param {any} canvas
 */
export function linkEntries(canvas) {
  const { graph } = canvas;
  const part = [...(canvas.renderedPaths ?? [])].find((each) => isPointedAt(canvas, each));
  if (!part || !graph) return [];
  const id = part.linkIds ? [...part.linkIds][0] : part.id; // of a reroute, or a link
  return entryFor(graph, [id], graph.getLink(id)?.type);
}
