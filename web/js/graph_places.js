/**
 * Where a node is: its object, its graph, and its place, which is what a prompt calls it ("7", or
 * "57:62" for node 62 in the subgraph of node 57).
 */
import { app } from "../../../scripts/app.js";

/** The open workflow's graph and those of all its subgraphs, each once. */
function allGraphs() {
  const root = app.rootGraph;
  return root ? [root, ...(root.subgraphs?.values() ?? [])] : [];
}

/** @returns {any[]} nodes of the open workflow, those of a subgraph once */
export function allNodes() {
  return allGraphs().flatMap((graph) => graph.nodes);
}

export function isOurs(node) {
  return String(node?.comfyClass).startsWith("Warmgraph");
}

/**
 * Whether a place is in the open workflow.
 * @param {{workflow: string | null}} place
 */
export function isOpen({ workflow }) {
  return workflow === String(app.rootGraph?.id);
}

export function isInside(graph) {
  return graph?.isRootGraph === false;
}

/** @returns {any} undefined where the open workflow has no such node */
export function nodeAt(place) {
  const ids = String(place).split(":");
  const id = ids.pop();
  let graph = app.rootGraph;
  for (const outer of ids) graph = find(graph, outer)?.subgraph;
  return find(graph, id);
}

/** Ids are numbers in one host and may be texts in another. */
function find(graph, id) {
  return graph?.nodes.find((node) => String(node.id) === id);
}

/** @returns {any[]} nodes that stand for this subgraph, wherever it is used */
function usesOf(subgraph) {
  return allNodes().filter((node) => node.subgraph === subgraph);
}

/**
 * A node in a subgraph that is used twice has two places.
 * @returns {string[]}
 */
export function placesOf(node) {
  if (!isInside(node.graph)) return [String(node.id)];
  return usesOf(node.graph)
    .flatMap(placesOf)
    .map((outer) => `${outer}:${node.id}`);
}

/** What people call a graph: its subgraph's name; nothing for the workflow itself. */
export function nameOf(graph) {
  if (!isInside(graph)) return undefined;
  return usesOf(graph)[0]?.getTitle?.() || graph.name;
}

/** The host takes smaller nodes for as large as this, in pixels. */
const LEAST = 300;

const nextFrame = () => new Promise((resolve) => requestAnimationFrame(resolve));

/** Show a node: open the graph that it is in, bring it to the middle, select it. */
export async function goTo(node) {
  const { canvas } = app;
  if (!node?.graph || !canvas) return;
  if (canvas.graph !== node.graph) {
    canvas.subgraph = isInside(node.graph) ? node.graph : undefined;
    canvas.setGraph(node.graph);
    await nextFrame(); // the host takes one to notice, and one to restore what was in view there
    await nextFrame();
  }
  canvas.deselectAll?.();
  canvas.select?.(node);
  const height = Math.max(node.boundingRect[3], LEAST);
  const zoom = Math.min(0.75, height / canvas.canvas.clientHeight); // no larger than it is
  canvas.animateToBounds(node.boundingRect, { zoom });
}
