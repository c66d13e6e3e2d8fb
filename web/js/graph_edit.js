/** Nodes put into links and taken out of them, in any graph of the workflow, as one step of Undo. */
import { app } from "../../../scripts/app.js";
import { freePlace } from "./free_place.js";

const TITLE = 30;
/** What a node's mode may be, as the host counts. */
export const ON = 0;
export const MUTED = 2;
export const BYPASSED = 4;


/** @typedef {{origin_id: any, origin_slot: number, target_id: any, target_slot: number, parentId?: any}} Link */

/**
 * All that `act` changes is one step, which Undo takes back.
 * @template T
 * @param {() => T} act
 * @returns {T}
 */
export function inOneStep(act) {
  const tracker = app.extensionManager?.workflow?.activeWorkflow?.changeTracker;
  // What the user did just before stays a step of its own.
  if (tracker?.captureCanvasState) tracker.captureCanvasState();
  else tracker?.checkState?.();
  app.canvas.emitBeforeChange();
  try {
    return act();
  } finally {
    app.canvas.emitAfterChange();
    app.canvas.setDirty(true, true);
  }
}

/** @param {any} graph @param {any} id a link's @returns {Link | undefined} a copy, which stays as it is */
export function linkOf(graph, id) {
  const link = id === null || id === undefined ? undefined : graph.getLink(id);
  if (!link) return undefined;
  const { origin_id, origin_slot, target_id, target_slot, parentId } = link;
  return { origin_id, origin_slot, target_id, target_slot, parentId };
}

/** From what a link comes from, a node's output or the subgraph's input, to a node's input. */
function connectFrom(graph, { origin_id, origin_slot, parentId }, node, slot) {
  const from = graph.getNodeById(origin_id);
  if (from) return from.connect(origin_slot, node, slot, parentId);
  return graph.inputNode?.slots[origin_slot]?.connect(node.inputs[slot], node, parentId);
}

/** From a node's output to what a link goes to, a node's input or the subgraph's output. */
function connectTo(graph, node, slot, { target_id, target_slot }, parentId) {
  const to = graph.getNodeById(target_id);
  if (to) return node.connect(slot, to, target_slot, parentId);
  return graph.outputNode?.slots[target_slot]?.connect(node.outputs[slot], node, parentId);
}

/** @returns {import("./free_place.js").Box} with its title */
function boxOf({ pos, size, flags }) {
  if (flags?.collapsed) return [pos[0], pos[1] - TITLE, 160, TITLE];
  return [pos[0], pos[1] - TITLE, size[0], size[1] + TITLE];
}

/** Where a link begins, or else where it ends. */
function pointOf(graph, { origin_id, origin_slot, target_id, target_slot }, begins) {
  const node = graph.getNodeById(begins ? origin_id : target_id);
  if (node) return [...(begins ? node.getOutputPos(origin_slot) : node.getInputPos(target_slot))];
  const [x, y, width, height] = (begins ? graph.inputNode : graph.outputNode).boundingRect;
  return [begins ? x + width : x, y + height / 2];
}

/**
 * Put a new node into links that come from the same place.
 * @param {any} graph
 * @param {string} kind class of the node; its first input and output take the links
 * @param {Link[]} links none of them may have gone
 * @returns {any} the node
 */
export function insert(graph, kind, links) {
  const node = LiteGraph.createNode(kind);
  const { inputNode, outputNode } = graph;
  const ends = [inputNode, outputNode].filter(Boolean).map((end) => [...end.boundingRect]);
  node.pos = freePlace({
    size: [node.size[0], node.size[1] + TITLE],
    title: TITLE,
    from: pointOf(graph, links[0], true),
    to: pointOf(graph, links[0], false),
    taken: [...graph.nodes.map(boxOf), ...ends],
    frames: graph.groups.map((group) => [...group.pos, ...group.size]),
  });
  graph.add(node);
  connectFrom(graph, links[0], node, 0);
  for (const link of links) connectTo(graph, node, 0, link);
  return node;
}

/**
 * Take a node out, and link what came in to where it went, type by type. Where that cannot be, from
 * a subgraph's input straight to its output, the node stays, bypassed.
 * @param {any} node
 */
export function takeOut(node) {
  const { graph } = node;
  const joined = (node.outputs ?? []).flatMap(({ type, links }) => {
    const input = node.inputs?.find((each) => each.type === type && each.link !== null);
    const incoming = linkOf(graph, input?.link);
    const outgoing = [...(links ?? [])].map((id) => linkOf(graph, id));
    return incoming ? outgoing.filter(Boolean).map((link) => [incoming, link]) : [];
  });
  const nodeOf = (id) => graph.getNodeById(id);
  if (joined.some(([a, b]) => !nodeOf(a.origin_id) && !nodeOf(b.target_id))) {
    node.mode = BYPASSED;
    return;
  }
  for (const [incoming, outgoing] of joined) {
    const from = nodeOf(incoming.origin_id);
    if (from) connectTo(graph, from, incoming.origin_slot, outgoing, incoming.parentId);
    else connectFrom(graph, incoming, nodeOf(outgoing.target_id), outgoing.target_slot);
  }
  graph.remove(node);
}
