/**
 * A toast once a model that was compiled is ready, and one once it is known how much faster that is;
 * the first of those offers the setting that compiles every model.
 */
import { app } from "../../../scripts/app.js";
import { toast } from "./asking.js";
import { showToast } from "./frontend.js";
import { isOpen } from "./graph_places.js";
import { newestSnapshot, watchReports } from "./reports.js";
import { FOR_ALL } from "./setting_ids.js";
import { linesOf, lineText, words } from "./words.js";

const LIFE = 20000;
/** Whether the setting was offered in this browser. */
const OFFERED = "warmgraph.offered";

/** @type {Map<string, "compiling" | "ready">} models whose end is to be told, by their ids */
const awaited = new Map();

function look() {
  const { models = [] } = newestSnapshot();
  const ids = models.map(({ id }) => id);
  for (const id of awaited.keys()) if (!ids.includes(id)) awaited.delete(id);
  for (const model of models) {
    const before = awaited.get(model.id);
    if (model.stage === "compiling") awaited.set(model.id, "compiling");
    else if (model.stage === "ready") {
      // Who waits for it gets it in this very image.
      if (before === "compiling" && model.ready && model.when_missing !== "wait") tellReady(model);
      if (before) awaited.set(model.id, "ready");
    } else if (before && model.stage !== "waiting") {
      awaited.delete(model.id);
      if (model.stage === "faster") tellFaster(model);
    }
  }
}

function tellReady({ model, nodes = [] }) {
  const summary = words("page.ready", { model });
  const said = { severity: "success", summary, detail: words("page.ready_detail"), life: LIFE };
  if (!nodes.some(isOpen)) toast("success", summary, said.detail, LIFE);
  else showToast(said, words("page.run_again"), runAgain);
}

function tellFaster(report) {
  const [first] = linesOf(report);
  const summary = words("page.quick", { model: report.model, factor: report.times });
  const detail = first?.key === "speed_faster" ? lineText(first) : undefined;
  const setting = app.extensionManager?.setting;
  if (setting?.get(FOR_ALL) !== false || localStorage.getItem(OFFERED))
    return toast("success", summary, detail, LIFE);
  localStorage.setItem(OFFERED, "1");
  const said = { severity: "success", summary, detail, life: 2 * LIFE };
  showToast(said, words("page.compile_all"), () => void setting.set(FOR_ALL, true));
}

function runAgain() {
  void app.extensionManager?.command?.execute("Comfy.QueuePrompt");
}

app.registerExtension({
  name: "Warmgraph.Ready.Toasts",
  setup() {
    watchReports((progress) => progress || look(), new AbortController().signal);
    look();
  },
});
