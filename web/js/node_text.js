/**
 * The box on a node: how quick its model is, how far its builds are, what is not compiled, and a
 * button that opens the whole report.
 */
import { button, el, progressBar, update } from "./elements.js";
import { percent } from "./format.js";
import { showFullReport } from "./full_report.js";
import { buildText } from "./sidebar_builds.js";
import { linesOf, lineText, wholeText, words } from "./words.js";

/**
 * @typedef {{key?: string, values?: Record<string, string>, text: string}} Line
 * @typedef {Record<string, any>} Report
 */

/** @param {Line} line */
function isOfBuilds({ key = "" }) {
  return key.startsWith("building");
}

/** @param {Report} report */
function isBuilding({ building }) {
  return building !== undefined && building.done < building.total;
}

/** @param {Report} report */
function reportPart(report) {
  const bar = isBuilding(report);
  const lines = linesOf(report).filter((line) => !(bar && isOfBuilds(line)));
  const { done, total } = report.building ?? {};
  const [first, ...rest] = lines.map((line) => el("div", {}, lineText(line)));
  const quick = Boolean(report.speed) || lines[0]?.key?.startsWith("speed_");
  first?.setAttribute("class", quick ? "warmgraph-headline" : "");
  return [
    first,
    bar &&
      progressBar(percent(done, total), buildText(report.building), {
        "aria-label": words("page.builds"),
      }),
    ...rest,
  ];
}

/**
 * @param {number} height of the box in pixels
 * @param {boolean} whole show all of the report instead
 */
export function makeBox(height, whole) {
  const text = el("div", { class: whole ? "warmgraph-whole" : undefined });
  const box = el("div", { class: "warmgraph-status" }, text);
  box.style.minHeight = `${height}px`;
  /** @type {Report[]} */
  let shown = [];

  text.addEventListener("click", ({ target }) => {
    if (!(/** @type {Element} */ (target).closest("[data-action=report]"))) return;
    const names = shown.map((report) => report.model ?? "DeepCache");
    showFullReport(names.join(", "), shown.map(wholeText).join("\n\n"));
  });

  const draw = (...parts) => {
    const next = el("div", { class: text.getAttribute("class") ?? undefined }, ...parts);
    update(text, next);
  };
  return {
    box,
    /** @param {string} newest */
    showText: (newest) => draw(newest),
    /**
     * @param {Report[]} reports
     * @param {boolean} eager whether all of them run as without us
     */
    showReports(reports, eager) {
      shown = reports;
      const mark = el("div", { class: "warmgraph-mark" }, `⚠ ${words("page.badge_eager")}`);
      const texts = whole
        ? [reports.map(wholeText).join("\n")]
        : reports.flatMap(reportPart);
      const more = !whole && reports.some((report) => report.text);
      draw(eager && mark, ...texts, more && button("report", words("page.full_report"), { class: "warmgraph-link" }));
    },
  };
}
