/** Nodes put into links and taken out of them, in any graph of the workflow, as one step of Undo. */
import { app } from "../../../scripts/app.js";
import { freePlace } from "./free_place.js";
import { linkInto, linksFrom } from "./frontend.js";

const TITLE = 30;

/** What a node's mode may be, as the host counts. */
export const ON = 0;
export const MUTED = 2;
export const BYPASSED = 4;

/** All that `act` changes is one step, which Undo takes back: call it only with something to do. */
export function inOneStep(act) {
  const tracker = app.extensionManager?.workflow?.activeWorkflow?.changeTracker;
  // What the user did just before stays a step of its own.
  (tracker?.captureCanvasState ?? tracker?.checkState)?.call(tracker);
  app.canvas.emitBeforeChange();
  try {
    return act();
  } finally {
    app.canvas.emitAfterChange();
    app.canvas.setDirty(true, true);
  }
}

/** From where a link begins, a node or the subgraph's input, to a node. */
function connectFrom(graph, { origin_id, origin_slot, parentId }, node, slot) {
  const from = graph.getNodeById(origin_id);
  if (from) from.connect(origin_slot, node, slot, parentId);
  else graph.inputNode.slots[origin_slot].connect(node.inputs[slot], node, parentId);
}

/** From a node to where a link ends, a node or the subgraph's output. */
function connectTo(graph, node, slot, { target_id, target_slot }, parentId) {
  const to = graph.getNodeById(target_id);
  if (to) node.connect(slot, to, target_slot, parentId);
  else graph.outputNode.slots[target_slot].connect(node.outputs[slot], node, parentId);
}

/** A node with its title. */
function boxOf({ pos: [x, y], size: [width, height], flags }) {
  return flags?.collapsed ? [x, y - TITLE, 160, TITLE] : [x, y - TITLE, width, height + TITLE];
}

/** The middle of a subgraph's side, at which its inputs end or its outputs begin. */
function sideOf({ boundingRect: [x, y, width, height] }, isInput) {
  return [isInput ? x + width : x, y + height / 2];
}

/**
 * Put a new node into links that come from the same place.
 * @param {string} kind class of the node; its first input and output take the links
 * @param {any[]} links copies of them
 * @returns {any} the node
 */
export function insert(graph, kind, links) {
  const node = LiteGraph.createNode(kind);
  const { inputNode, outputNode } = graph;
  const [{ origin_id, origin_slot, target_id, target_slot }] = links;
  const sides = [inputNode, outputNode].filter(Boolean).map(({ boundingRect }) => boundingRect);
  node.pos = freePlace({
    size: [node.size[0], node.size[1] + TITLE],
    title: TITLE,
    from: graph.getNodeById(origin_id)?.getOutputPos(origin_slot) ?? sideOf(inputNode, true),
    to: graph.getNodeById(target_id)?.getInputPos(target_slot) ?? sideOf(outputNode, false),
    taken: [...graph.nodes.map(boxOf), ...sides],
    frames: graph.groups.map(({ pos, size }) => [...pos, ...size]),
  });
  graph.add(node);
  connectFrom(graph, links[0], node, 0);
  for (const link of links) connectTo(graph, node, 0, link);
  return node;
}

/**
 * Take a node out, and link what came in to where it went, type by type. Where that cannot be, from
 * a subgraph's input straight to its output, the node stays, bypassed.
 */
export function takeOut(node) {
  const { graph } = node;
  const nodeOf = (id) => graph.getNodeById(id);
  const joined = (node.outputs ?? []).flatMap((output) => {
    const incoming = linkInto(
      node,
      node.inputs?.find(({ type }) => type === output.type),
    );
    return incoming ? linksFrom(node, output).map((outgoing) => [incoming, outgoing]) : [];
  });
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
