/**
 * Which reports the nodes of a workflow had last, as long as the browser's tab is open: the host
 * forgets a node's result when the page is loaded anew.
 */

const KEY = "warmgraph.nodes";
/** Workflows that are remembered. */
const KEPT = 30;

/** @returns {Record<string, Record<string, string[]>>} by workflow, then by node, newest last */
function read() {
  return JSON.parse(sessionStorage.getItem(KEY) ?? "{}");
}

/**
 * @param {string} workflow
 * @param {string} node
 * @param {string[]} ids of its reports
 */
export function remember(workflow, node, ids) {
  const { [workflow]: nodes = {}, ...others } = read();
  const kept = Object.entries(others).slice(1 - KEPT);
  const all = { ...Object.fromEntries(kept), [workflow]: { ...nodes, [node]: ids } };
  sessionStorage.setItem(KEY, JSON.stringify(all));
}

/**
 * @param {string} workflow
 * @param {string} node
 * @returns {string[]}
 */
export function recall(workflow, node) {
  return read()[workflow]?.[node] ?? [];
}
