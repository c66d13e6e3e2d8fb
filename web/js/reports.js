/**
 * What the server's one event says: the newest report of each model, or a line of progress for one
 * node. The reports are also fetched when the page opens, and when it finds a server again that it had
 * lost. The surfaces beside this file show it.
 */
import { api } from "../../../scripts/api.js";

const EVENT = "warmgraph.report";

/** Between two fetches that a surface asks for, in milliseconds. */
const PAUSE = 1000;

/**
 * @typedef {{
 *   id: string, lines: {key: string, text: string}[], text: string,
 *   nodes?: {workflow: string | null, node: string}[], [part: string]: any,
 * }} Report of a model, or of a DeepCache
 * @typedef {{node: string, text: string, lines?: {key: string, text: string}[]}} Progress
 * @typedef {{models?: Report[], deepcaches?: Report[], stepcaches?: Report[], [part: string]: any}} Snapshot
 */

/** @type {Snapshot} what the server said last; `stored` and `runs` are as old as the last fetch */
let newest = {};

/** @type {Map<string, Report>} */
const reports = new Map();

/** @type {Set<(progress?: Progress) => void>} */
const watchers = new Set();

function tell(progress) {
  for (const watcher of watchers) watcher(progress);
}

/** Whether a model was made to compare with: it is no node's in a workflow. */
const isPlain = ({ nodes = [] }) => nodes.some(({ node }) => node.endsWith("-plain"));

function keep(snapshot) {
  const { models: all = [], deepcaches = [], stepcaches = [] } = snapshot;
  const models = all.filter((model) => !isPlain(model));
  newest = { ...newest, ...snapshot, models };
  reports.clear();
  for (const report of [...models, ...deepcaches, ...stepcaches]) reports.set(report.id, report);
  tell();
}

/** @returns {Snapshot} */
export function newestSnapshot() {
  return newest;
}

/** @returns {Report | undefined} */
export function reportOf(id) {
  return reports.get(id);
}

/**
 * What the server says a node attached last.
 * @param {string} workflow its id
 * @param {string[]} places of the node in a prompt
 * @returns {Report[]}
 */
export function reportsAt(workflow, places) {
  const isThere = (at) => at.workflow === workflow && places.includes(at.node);
  return [...reports.values()].filter(({ nodes = [] }) => nodes.some(isThere));
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

/** @returns {Promise<Snapshot>} {} when the server does not answer */
export async function fetchReports() {
  const response = await api.fetchApi("/warmgraph/report").catch(() => undefined);
  if (!response?.ok) return {};
  const snapshot = await response.json();
  keep(snapshot);
  return snapshot;
}

/** @type {Promise<Snapshot> | undefined} */
let opened;

/** All that the server knew when the page opened. */
export function openingReports() {
  opened ??= fetchReports();
  return opened;
}

let fetched = 0;
/** @type {number | undefined} */
let waiting;

/** Fetch what events do not bring; as often as one likes, it is done once a second at most. */
export function refreshReports() {
  if (waiting !== undefined) return;
  const wait = Math.max(0, fetched + PAUSE - Date.now());
  waiting = window.setTimeout(() => {
    waiting = undefined;
    fetched = Date.now();
    void fetchReports();
  }, wait);
}

// A model that nothing called is known for it once its prompt has left the queue.
api.addEventListener("status", ({ detail }) => {
  if (detail?.exec_info?.queue_remaining === 0) refreshReports();
});
api.addEventListener("reconnected", () => void fetchReports());
api.addEventListener(EVENT, ({ detail }) => (detail.node ? tell(detail) : keep(detail)));
