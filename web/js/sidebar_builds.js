/** What is being built, with buttons to pause and to cancel it. */
import { button, el, progressBar } from "./elements.js";
import { buildsStand } from "./figures.js";
import { number } from "./format.js";
import { words } from "./words.js";

/** Seconds from which on a time is told in minutes, as on the nodes. */
const MINUTES_FROM = 90;

/** @param {{done: number, total: number, seconds_left?: number | null, paused?: boolean}} building */
function buildText({ done, total, seconds_left: left, paused }) {
  const values = { done, total, seconds: number(left ?? 0), minutes: number((left ?? 0) / 60) };
  if (paused) return words("page.build_paused", values);
  if (left == null) return words("page.build", values);
  return words(left < MINUTES_FROM ? "page.build_left" : "page.build_left_minutes", values);
}

/**
 * @param {Record<string, any>} snapshot
 * @param {Set<string>} busy
 */
export function buildsSection({ building }, busy) {
  const parts = {
    going: () => running(building, busy),
    paused: () => [el("p", {}, words("page.builds_paused")), buttons(["resume"], busy)],
    none: () => [el("p", {}, words("page.no_builds"))],
  };
  return el(
    "section",
    { "data-key": "builds", "aria-labelledby": "warmgraph-builds" },
    el("h3", { id: "warmgraph-builds" }, words("page.builds")),
    ...parts[buildsStand(building)](),
    buildsStand(building) === "going" && building.workers > 0 && el("p", {}, words("page.workers", { count: building.workers })),
  );
}

function running(building, busy) {
  const { fraction = 0, running: labels = [], paused } = building;
  return [
    progressBar(100 * fraction, buildText(building), { "aria-label": words("page.builds") }),
    labels.length > 0 &&
      el("ul", { class: "warmgraph-plain" }, ...labels.map((label) => el("li", {}, label))),
    paused !== undefined && buttons([paused ? "resume" : "pause", "cancel"], busy),
  ];
}

/** @param {string[]} actions */
function buttons(actions, busy) {
  const made = actions.map((name) =>
    button(name, words(`page.${name}`), { disabled: busy.has(name) }),
  );
  return el("div", { class: "warmgraph-buttons" }, ...made);
}
