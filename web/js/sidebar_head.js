/** What the tab begins with: how long steps of the open workflow take, and one bar for all that compiles. */
import { el, progressBar } from "./elements.js";
import { buildsStand } from "./figures.js";
import { duration, number } from "./format.js";
import { isOpen } from "./graph_places.js";
import { words } from "./words.js";

/** Seconds from which on a time is told in minutes, as on the nodes. */
const MINUTES_FROM = 90;

/** @param {Record<string, any>} snapshot */
export function head({ models = [], building }) {
  return el("div.head", { "data-key": "head" }, el("h2", "Warmgraph"), figures(models), bar(building));
}

/** Of what the open workflow's nodes attached: the time of a step, and how much of it is compiled. */
function figures(models) {
  const here = models.filter(({ nodes = [] }) => nodes.some(isOpen));
  const sum = (name) => here.reduce((total, { regions }) => total + (regions?.[name] ?? 0), 0);
  const texts = here
    .filter(({ speed }) => speed)
    .map(({ model, speed: { ms, form } }) => words("page.now", { model, ms: duration(ms[form]) }));
  if (sum("total")) texts.push(words("page.parts", { compiled: sum("compiled"), total: sum("total") }));
  return texts.length > 0 && el("p.now", texts.join(" · "));
}

function bar(building) {
  if (buildsStand(building) !== "going") return undefined;
  const label = { "aria-label": words("page.builds") };
  return progressBar(100 * (building.fraction ?? 0), buildText(building), label);
}

function buildText({ done, total, seconds_left: left, paused }) {
  const values = { done, total, seconds: number(left ?? 0), minutes: number((left ?? 0) / 60) };
  const key = left == null ? "build" : left < MINUTES_FROM ? "build_left" : "build_left_minutes";
  return words(`page.${paused ? "build_paused" : key}`, values);
}
