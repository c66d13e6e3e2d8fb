/**
 * The commands that make a workflow faster, and that take Warmgraph out of it. Where Compile Model
 * belongs is the server's to say: it is asked with the prompt that the page would send.
 */
import { app } from "../../../scripts/app.js";
import { post, toast } from "./asking.js";
import { BYPASSED, inOneStep, insert, linkOf, MUTED, ON, takeOut } from "./graph_edit.js";
import { allNodes, goTo, isInside, nameOf, nodeAt, placesOf } from "./graph_places.js";
import { toastWithButton } from "./toast_button.js";
import { lineText, words } from "./words.js";

/** By what is compiled. */
export const KINDS = { model: "WarmgraphCompileModel", vae: "WarmgraphCompileVAE" };

/** Milliseconds that toasts stay. */
const LIFE = 12000;

/** @param {any} node */
export function isOurs(node) {
  return String(node?.comfyClass).startsWith("Warmgraph");
}

/** @typedef {{graph: any, kind: "model" | "vae", links: any[]}} Spot links that one node goes into */

/**
 * The links before the inputs that the server named, by graph and by what they come from. A subgraph
 * that is used several times has each of them once.
 * @param {{node: string, input: string, kind: "model" | "vae"}[]} places
 * @param {Record<string, any>} prompt
 * @returns {Spot[]}
 */
function spotsOf(places, prompt) {
  const named = new Set(places.map(({ node, input }) => `${node} ${input}`));
  /** @type {Map<string, Spot>} */
  const spots = new Map();
  for (const { node: place, input, kind } of places) {
    let node = nodeAt(place);
    let slot = node?.inputs?.findIndex(({ name }) => name === input) ?? -1;
    let link = linkOf(node?.graph, node?.inputs?.[slot]?.link);
    if (!link) continue;
    const comesFromOutside = isInside(node.graph) && !node.graph.getNodeById(link.origin_id);
    const isNamed = (use) => !(use in prompt) || named.has(`${use} ${input}`);
    if (comesFromOutside && !placesOf(node).every(isNamed)) {
      // Another use of this subgraph gets a model that is to be left alone: outside they differ.
      const { name } = node.graph.inputs[link.origin_slot];
      node = nodeAt(place.slice(0, place.lastIndexOf(":")));
      slot = node.inputs.findIndex((each) => each.name === name);
      link = linkOf(node.graph, node.inputs[slot]?.link);
      if (!link) continue;
    }
    const key = [node.graph.id, link.origin_id, link.origin_slot].join(" ");
    const spot = spots.get(key) ?? { graph: node.graph, kind, links: [] };
    const isNew = ({ target_id, target_slot }) =>
      target_id !== link.target_id || target_slot !== link.target_slot;
    if (spot.links.every(isNew)) spot.links.push(link);
    spots.set(key, spot);
  }
  return [...spots.values()];
}

/** A node of ours that is bypassed in this link, perhaps behind others that are, too. */
function asleep({ graph, kind, links: [link] }) {
  let node = graph.getNodeById(link.origin_id);
  while (node?.mode === BYPASSED && node.comfyClass !== KINDS[kind]) {
    const input = node.inputs?.find(({ type }) => type === kind.toUpperCase());
    node = graph.getNodeById(linkOf(graph, input?.link)?.origin_id);
  }
  return node?.mode === BYPASSED ? node : undefined;
}

/** @param {any[]} nodes */
function whereOf(nodes) {
  const names = nodes.map(({ graph }) => nameOf(graph) ?? words("page.this_workflow"));
  return [...new Set(names)].join(", ");
}

/**
 * @param {any[]} added
 * @param {any[]} awake
 */
export function tellOf(added, awake = []) {
  const said = [
    added.length && words("page.added", { count: added.length, where: whereOf(added) }),
    awake.length && words("page.switched_on", { count: awake.length, where: whereOf(awake) }),
  ];
  const summary = `Warmgraph: ${said.filter(Boolean).join("; ")}`;
  const message = { severity: "success", summary, detail: words("page.press_run"), life: LIFE };
  void toastWithButton(message, words("page.show"), () => goTo([...added, ...awake][0]));
}

/**
 * @param {boolean} vae whether VAEs get a Compile VAE, too
 */
export async function makeFaster(vae) {
  const { output: prompt } = await app.graphToPrompt();
  const answer = await post("/warmgraph/places", { prompt, vae });
  if (!answer) return;
  const wanted = Object.entries(KINDS).flatMap(([kind, name]) => (kind === "vae" && !vae ? [] : name));
  const added = [];
  const awake = [];
  inOneStep(() => {
    const wake = (node) => {
      node.mode = ON;
      awake.push(node);
    };
    // Nothing gets through a muted one: such a prompt has no model to ask about.
    allNodes().filter((node) => node.mode === MUTED && wanted.includes(node.comfyClass)).forEach(wake);
    for (const spot of spotsOf(answer.places, prompt)) {
      const node = asleep(spot);
      if (node) wake(node);
      else added.push(insert(spot.graph, KINDS[spot.kind], spot.links));
    }
  });
  if (added.length || awake.length) tellOf(added, awake);
  else {
    const why = [...new Set(answer.left.map(({ line }) => lineText(line)))].slice(0, 2);
    const detail = why.join("\n") || words("page.no_sampler");
    toast("info", `Warmgraph: ${words("page.nothing_added")}`, detail, LIFE);
  }
}

export function removeOurs() {
  const ours = allNodes().filter(isOurs);
  const where = whereOf(ours);
  inOneStep(() => ours.forEach(takeOut));
  const count = ours.length;
  const said = count ? words("page.removed", { count, where }) : words("page.nothing_removed");
  toast(count ? "success" : "info", `Warmgraph: ${said}`, undefined, LIFE);
}
