/** "Compile Model here" in the menus of nodes and links: one node, where the user points. */
import { linkInto, linksFrom, linkWith } from "./frontend.js";
import { inOneStep, insert } from "./graph_edit.js";
import { isOurs } from "./graph_places.js";
import { KINDS, tellOf } from "./make_faster.js";
import { words } from "./words.js";

/** How near to a link's middle one must be, in the canvas' pixels. */
const NEAR = 15;

/** An entry for links that come from the same place; none where a node of ours serves all. */
function entryFor(graph, all, kind) {
  const isFree = (id) => !isOurs(graph.getNodeById(id));
  const links = all.filter((link) => link && isFree(link.origin_id) && isFree(link.target_id));
  const callback = () => tellOf([inOneStep(() => insert(graph, KINDS[kind], links))]);
  return links.length ? [{ content: words(`page.compile_${kind}_here`), callback }] : [];
}

/** Behind what gives a model or a VAE, else before what takes one. */
export function nodeEntries(node) {
  if (isOurs(node) || !node.graph) return [];
  return Object.keys(KINDS).flatMap((kind) => {
    const [given, taken] = [node.outputs, node.inputs].map((slots) =>
      (slots ?? []).filter(({ type }) => type === kind.toUpperCase()),
    );
    const each = given.length
      ? given.map((output) => linksFrom(node, output))
      : taken.map((input) => [linkInto(node, input)]);
    return each.flatMap((links) => entryFor(node.graph, links, kind)).slice(0, 1);
  });
}

/** Of the link whose middle the pointer is at. */
export function linkEntries({ graph, graph_mouse: [x, y], renderedPaths }) {
  const isThere = ({ _pos: at }) => at && Math.hypot(at[0] - x, at[1] - y) < NEAR;
  const part = [...(renderedPaths ?? [])].find(isThere); // a link, or one of its reroutes
  const id = part?.linkIds ? [...part.linkIds][0] : part?.id;
  const kind = String(graph?.getLink(id)?.type).toLowerCase();
  return kind in KINDS ? entryFor(graph, [linkWith(graph, id)], kind) : [];
}
