/**
 * What the server's one event says: the newest report of each model, or a line of progress for one
 * node. The reports are also fetched when the page opens, and when it finds a server again that it had
 * lost. The surfaces beside this file show it.
 */
import { api } from "../../../scripts/api.js";

const EVENT = "warmgraph.report";

/** @typedef {{id: string, summary: string, text?: string}} Report of a model, or of a DeepCache */

/** @type {Map<string, Report>} */
const reports = new Map();

/** @typedef {{node: string, text: string}} Progress */

/** @type {Set<(progress?: Progress) => void>} */
const watchers = new Set();

/** @param {Progress} [progress] */
function tell(progress) {
  for (const watcher of watchers) watcher(progress);
}

/** @param {{models?: Report[], deepcaches?: Report[]}} snapshot */
function keep({ models = [], deepcaches = [] }) {
  reports.clear();
  for (const report of [...models, ...deepcaches]) reports.set(report.id, report);
  tell();
}

/**
 * @param {string} id
 * @returns {Report | undefined}
 */
export function reportOf(id) {
  return reports.get(id);
}

/**
 * Call `watcher` after each change of the reports, and with each line of progress, until `signal`
 * is aborted.
 * @param {(progress?: Progress) => void} watcher
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

api.addEventListener("reconnected", () => void fetchReports());
api.addEventListener(EVENT, ({ detail }) => (detail.node ? tell(detail) : keep(detail)));
