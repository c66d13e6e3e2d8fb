/**
 * A toast for each thing that needs attention, once as long as the page's browser tab is open. What to
 * do about it is told in the tab.
 */
import { app } from "../../../scripts/app.js";
import { showToast } from "./frontend.js";
import { newestSnapshot, watchReports } from "./reports.js";
import { openTab } from "./sidebar.js";
import { lineText, words } from "./words.js";

const SHOWN = "warmgraph.warnings";

function showNew() {
  /** @type {string[]} */
  const shown = JSON.parse(sessionStorage.getItem(SHOWN) ?? "[]");
  const fresh = (newestSnapshot().warnings ?? []).filter(({ id }) => !shown.includes(id));
  if (!fresh.length) return;
  for (const { lines } of fresh) {
    const said = { severity: "warn", summary: `Warmgraph: ${lineText(lines[0])}`, life: 20000 };
    showToast(said, words("page.show_in_tab"), openTab);
  }
  sessionStorage.setItem(SHOWN, JSON.stringify([...shown, ...fresh.map(({ id }) => id)]));
}

app.registerExtension({
  name: "Warmgraph.Warnings.Toasts",
  setup() {
    watchReports((progress) => progress || showNew(), new AbortController().signal);
    showNew();
  },
});
