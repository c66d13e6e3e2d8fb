/** What is being built, with buttons to pause and to cancel it. */
import { button, el, progressBar } from "./elements.js";
import { number, percent } from "./format.js";
import { words } from "./words.js";

/** @param {{done: number, total: number, seconds_left?: number | null, paused?: boolean}} building */
export function buildText({ done, total, seconds_left: left, paused }) {
  const values = { done, total, seconds: number(left ?? 0) };
  if (paused) return words("page.build_paused", values);
  return words(left == null ? "page.build" : "page.build_left", values);
}

/**
 * @param {Record<string, any>} snapshot
 * @param {Set<string>} busy
 */
export function buildsSection({ building }, busy) {
  const going = building && building.done < building.total;
  return el(
    "section",
    { "data-key": "builds", "aria-labelledby": "warmgraph-builds" },
    el("h3", { id: "warmgraph-builds" }, words("page.builds")),
    ...(going ? running(building, busy) : [el("p", {}, words("page.no_builds"))]),
    building?.workers > 0 && el("p", {}, words("page.workers", { count: building.workers })),
  );
}

function running(building, busy) {
  const { done, total, running: labels = [], paused } = building;
  const pausing = paused ? "resume" : "pause";
  return [
    progressBar(percent(done, total), buildText(building), { "aria-label": words("page.builds") }),
    labels.length > 0 &&
      el("ul", { class: "warmgraph-plain" }, ...labels.map((label) => el("li", {}, label))),
    paused !== undefined &&
      el(
        "div",
        { class: "warmgraph-buttons" },
        button(pausing, words(`page.${pausing}`), { disabled: busy.has(pausing) }),
        button("cancel", words("page.cancel"), { disabled: busy.has("cancel") }),
      ),
  ];
}
