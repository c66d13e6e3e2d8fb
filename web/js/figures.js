/** What bars, plots and tables are drawn from: plain data out of plain data. */
import { percent } from "./format.js";

/** How a step can be made, slowest first. */
const FORMS = ["eager", "exact", "compiled"];

/**
 * @typedef {{
 *   at: number, model: string, size: string, batch: number, steps: number, form: string,
 *   ms: number | null, noise: number | null, busy: boolean, eager_ms: number | null,
 *   builds: number, misses: number, prompt: string | null,
 * }} Run
 */

/**
 * The bars of what was measured, each as long as its time beside the longest.
 * @param {{form: string, ms: Record<string, number>} | null} [speed]
 * @returns {{form: string, ms: number, share: number, current: boolean}[]}
 */
export function barsOf(speed) {
  if (!speed) return [];
  const forms = FORMS.filter((form) => speed.ms[form] > 0);
  const longest = Math.max(...forms.map((form) => speed.ms[form]));
  return forms.map((form) => ({
    form,
    ms: speed.ms[form],
    share: percent(speed.ms[form], longest),
    current: form === speed.form,
  }));
}

/**
 * What goes on with builds: a pause lasts although nothing waits for its end.
 * @param {{done: number, total: number, paused?: boolean} | undefined} building
 */
export function buildsStand(building) {
  if (building && building.done < building.total) return "going";
  return building?.paused ? "paused" : "none";
}

/** The newest run's like: same model, size and batch, their times known. */
export function seriesOf(runs) {
  const timed = runs.filter((run) => run.ms !== null);
  const newest = timed[timed.length - 1];
  if (!newest) return [];
  return timed.filter((run) => ["model", "size", "batch"].every((name) => run[name] === newest[name]));
}

/** Where each run's dot is in a field of this width and height; times start at 0. */
export function dotsOf(series, width, height) {
  const top = Math.max(...series.flatMap((run) => [run.ms, run.eager_ms ?? 0]));
  const up = (ms) => height - (height * ms) / top;
  const step = series.length > 1 ? width / (series.length - 1) : 0;
  const dots = series.map((run, place) => ({
    x: series.length > 1 ? place * step : width / 2,
    y: up(run.ms),
    run,
  }));
  const eager = series[series.length - 1]?.eager_ms;
  return { dots, top, eager: eager ? up(eager) : undefined };
}

const COLUMNS = [
  "at", "model", "size", "batch", "steps", "form", "ms", "eager_ms", "builds", "misses",
]; // prettier-ignore

/** A text that a spreadsheet takes for a formula is written as a text. */
function cell(value) {
  const text = String(value ?? "");
  const plain = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

/** @returns {string} a line for each run below the columns' names, times in ISO 8601 */
export function csvOf(runs) {
  const lines = runs.map((run) => ({ ...run, at: new Date(run.at * 1000).toISOString() }));
  const rows = [COLUMNS, ...lines.map((run) => COLUMNS.map((name) => run[name]))];
  return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}
