/** What the tab's buttons do. */
import { app } from "../../../scripts/app.js";
import { confirmed, copy, download, post, toast } from "./asking.js";
import { bypass } from "./bypass.js";
import { compare } from "./compare.js";
import { csvOf } from "./figures.js";
import { bytes } from "./format.js";
import { showFullReport } from "./full_report.js";
import { makeFaster } from "./make_faster.js";
import { fetchReports, newestSnapshot, refreshReports, reportOf } from "./reports.js";
import { showNode } from "./sidebar_jump.js";
import { clearable } from "./sidebar_store.js";
import { wholeText, words } from "./words.js";

const builds = (action) => async () => {
  await post("/warmgraph/builds", { action });
  refreshReports();
};

const clear = (what) => async () => {
  const { files, size } = clearable(newestSnapshot(), what);
  const values = { count: files, size: bytes(size) };
  if (!(await confirmed(words(`page.clear_${what}`), words(`page.clear_${what}_warning`, values)))) return;
  const answer = await post("/warmgraph/store", { action: "clear", what });
  if (answer) {
    const removed = { count: answer.removed, size: bytes(answer.bytes) };
    toast("success", words("page.cleared", removed), undefined, 5000);
  }
  refreshReports();
};

async function free() {
  const answer = await post("/warmgraph/captured", { action: "free" });
  if (answer) {
    const freed = answer.done ? "page.freed" : "page.freed_later";
    toast("success", words(freed, { size: bytes(answer.bytes) }), undefined, 5000);
  }
  refreshReports();
}

/** All runs to now: what the tab shows can be a second old. */
async function exportRuns() {
  const { runs = newestSnapshot().runs ?? [] } = await fetchReports();
  download("warmgraph-runs.csv", csvOf(runs), "text/csv");
}

/** By the name that a button carries; each gets what else stands on the button. */
export const ACTIONS = {
  pause: builds("pause"),
  resume: builds("resume"),
  cancel: builds("cancel"),
  "clear-unused": clear("unused"),
  "clear-unfit": clear("unfit"),
  "clear-all": clear("all"),
  free,
  export: exportRuns,
  compare,
  copy: ({ text }) => copy(text),
  bypass: ({ nodes }) => bypass(JSON.parse(nodes)),
  report: ({ id }) => {
    const report = reportOf(id) ?? {};
    showFullReport(report.model ?? "DeepCache", wholeText(report));
  },
  "make-faster": () => makeFaster(),
  node: ({ id }) => showNode(reportOf(id)),
  templates: () => app.extensionManager.command.execute("Comfy.BrowseTemplates"),
};
