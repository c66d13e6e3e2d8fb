/**
 * The tab "Warmgraph" in the page's sidebar: what Warmgraph does on this server, and what one can do
 * about it. It is drawn from one snapshot, after each change of it.
 */
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { compareButton } from "./compare_button.js";
import { el, update } from "./elements.js";
import { watchLanguage } from "./locale.js";
import { newestSnapshot, refreshReports, watchReports } from "./reports.js";
import { ACTIONS } from "./sidebar_actions.js";
import { buildsSection } from "./sidebar_builds.js";
import { head } from "./sidebar_head.js";
import { TAB } from "./sidebar_icon.js";
import { memorySection } from "./sidebar_memory.js";
import { modelsSection } from "./sidebar_models.js";
import { runsSection } from "./sidebar_runs.js";
import { savedLine } from "./sidebar_saved.js";
import { storeSection } from "./sidebar_store.js";
import { warningsSection } from "./sidebar_warnings.js";
import { words } from "./words.js";

/** @typedef {import("./reports.js").Snapshot} Snapshot */

/** @param {Set<string>} busy actions under way */
export function tabOf(snapshot, busy) {
  const sections = [
    savedLine(snapshot),
    warningsSection(snapshot),
    modelsSection(snapshot),
    compareButton(snapshot, busy),
    buildsSection(snapshot, busy),
    storeSection(snapshot, busy),
    memorySection(snapshot, busy),
    runsSection(snapshot),
  ];
  return el("div.tab", head(snapshot), ...sections);
}

/** What events do not bring has changed when one of these has. */
function mark({ store, builds, loads, runs_made: runs }) {
  return JSON.stringify([store?.files, store?.bytes, builds, loads, runs]);
}

/** @type {AbortController | undefined} of the tab while it is open */
let closing;

function open(place) {
  if (closing && place.querySelector(".warmgraph-tab")) return; // the host may ask again
  close();
  closing = new AbortController();
  const { signal } = closing;
  /** @type {Set<string>} */
  const busy = new Set();
  const tab = tabOf(newestSnapshot(), busy);
  place.replaceChildren(tab);
  const draw = () => update(tab, tabOf(newestSnapshot(), busy));

  let shown = mark(newestSnapshot());
  watchReports((progress) => {
    if (progress) return;
    const now = mark(newestSnapshot());
    if (now !== shown) refreshReports();
    shown = now;
    draw();
  }, signal);
  watchLanguage(draw, signal);
  window.addEventListener("focus", refreshReports, { signal });
  api.addEventListener("progress", refreshReports, { signal }); // a step is made
  tab.addEventListener("click", (event) => void act(event, busy, draw), { signal });
  refreshReports();
}

async function act(event, busy, draw) {
  const pressed = /** @type {Element} */ (event.target).closest("[data-action]");
  if (!(pressed instanceof HTMLElement)) return;
  const { action } = pressed.dataset;
  if (busy.has(action)) return;
  busy.add(action);
  draw();
  try {
    await ACTIONS[action](pressed.dataset);
  } finally {
    busy.delete(action);
    draw();
  }
}

function close() {
  closing?.abort();
  closing = undefined;
}

/** Open the tab, if it is not. */
export function openTab() {
  const { sidebarTab, command } = app.extensionManager ?? {};
  if (sidebarTab?.activeSidebarTabId !== TAB) command?.execute(`Workspace.ToggleSidebarTab.${TAB}`);
}

app.registerExtension({
  name: "Warmgraph.Sidebar.Tab",
  setup() {
    app.extensionManager?.registerSidebarTab?.({
      id: TAB,
      icon: "pi pi-gauge",
      title: "Warmgraph",
      label: "Warm\u00adgraph", // too long for one line there
      tooltip: words("page.tab_tooltip"),
      type: "custom",
      render: open,
      destroy: close,
    });
  },
});
