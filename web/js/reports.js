/**
 * The newest report of each model, from the server's one event; fetched once when the page opens.
 * This file shows nothing; the surfaces beside it do.
 */
import { api } from "../../../scripts/api.js";

const EVENT = "warmgraph.report";

/** @typedef {{id: string, summary: string, text: string}} ModelReport */

/** @type {Map<string, ModelReport>} */
const reports = new Map();

/** @type {Set<() => void>} */
const watchers = new Set();

/** @param {{models?: ModelReport[]}} snapshot */
function keep(snapshot) {
  reports.clear();
  for (const report of snapshot.models ?? []) reports.set(report.id, report);
  for (const watcher of watchers) watcher();
}

/**
 * @param {string} id
 * @returns {ModelReport | undefined}
 */
export function reportOf(id) {
  return reports.get(id);
}

/**
 * Call `watcher` after each change until `signal` is aborted.
 * @param {() => void} watcher
 * @param {AbortSignal} signal
 */
export function watchReports(watcher, signal) {
  watchers.add(watcher);
  signal.addEventListener("abort", () => watchers.delete(watcher), { once: true });
}

/** @type {Promise<{settings?: Record<string, number>}> | undefined} */
let opened;

/** @returns {Promise<{settings?: Record<string, number>}>} {} when the server does not answer */
async function fetchReports() {
  const response = await api.fetchApi("/warmgraph/report").catch(() => undefined);
  if (!response?.ok) return {};
  const snapshot = await response.json();
  keep(snapshot);
  return snapshot;
}

/** All that the server knew when the page opened. */
export function openingReports() {
  opened ??= fetchReports();
  return opened;
}

api.addEventListener(EVENT, (event) => keep(event.detail));
