/**
 * The box on a node: how quick its model is, how far its builds are, what is not compiled, and a
 * button that opens the whole report.
 */
import { button, el, progressBar, update } from "./elements.js";
import { showFullReport } from "./full_report.js";
import { newestSnapshot } from "./reports.js";
import { ACTIONS } from "./sidebar_actions.js";
import { linesOf, lineText, wholeText, words } from "./words.js";

/**
 * @typedef {{key?: string, values?: Record<string, string>, text: string}} Line
 * @typedef {Record<string, any>} Report
 */

/** Of lines that tell what is gained. */
const HEADLINES = new Set(["ready", "speed_faster", "speed_known", "speed_nearest", "speed_slower"]);

/**
 * What is being compiled is a bar, and the way on where that rests.
 * @param {Record<string, any>} [building] of the report, or of the server
 */
function linePart(line, building) {
  const { key = "" } = line;
  if (!key.startsWith("building") || !building?.total)
    return [el("div", { class: HEADLINES.has(key) ? "warmgraph-headline" : undefined }, lineText(line))];
  const bar = progressBar(100 * (building.fraction ?? 0), lineText(line), {
    "aria-label": words("page.builds"),
  });
  return [bar, building.paused && button("resume", words("page.resume"))];
}

function reportPart(report) {
  return linesOf(report).flatMap((line) => linePart(line, report.building));
}

/**
 * @param {number} height of the box in pixels
 * @param {boolean} whole show all of the report instead
 */
export function makeBox(height, whole) {
  const text = el("div", { class: whole ? "warmgraph-whole" : undefined });
  const box = el("div.status", text);
  box.style.minHeight = `${height}px`;
  /** @type {Report[]} */
  let shown = [];

  text.addEventListener("click", ({ target }) => {
    const pressed = /** @type {Element} */ (target).closest("[data-action]");
    if (pressed?.getAttribute("data-action") === "resume") return void ACTIONS.resume();
    if (!pressed) return;
    const names = shown.map((report) => report.model ?? "DeepCache");
    showFullReport(names.join(", "), shown.map(wholeText).join("\n\n"));
  });

  const draw = (...parts) => {
    const next = el("div", { class: text.getAttribute("class") ?? undefined }, ...parts);
    update(text, next);
  };
  return {
    box,
    showText: (newest) => draw(newest),
    /** @param {Line[]} lines of what goes on while a prompt waits */
    showProgress: (lines) => draw(...lines.flatMap((line) => linePart(line, newestSnapshot().building))),
    /** @param {boolean} eager whether all of them run as without us */
    showReports(reports, eager) {
      shown = reports;
      const mark = el("div.mark", `⚠ ${words("page.badge_eager")}`);
      const texts = whole ? [reports.map(wholeText).join("\n")] : reports.flatMap(reportPart);
      const more = !whole && reports.some((report) => report.text);
      draw(
        eager && mark,
        ...texts,
        more && button("report", words("page.full_report"), { class: "warmgraph-link" }),
      );
    },
  };
}
