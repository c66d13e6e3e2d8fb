/** A toast for each thing that a user can mend, once as long as the page's browser tab is open. */
import { app } from "../../../scripts/app.js";
import { toast } from "./asking.js";
import { newestSnapshot, watchReports } from "./reports.js";
import { lineText } from "./words.js";

const SHOWN = "warmgraph.warnings";

function showNew() {
  /** @type {string[]} */
  const shown = JSON.parse(sessionStorage.getItem(SHOWN) ?? "[]");
  const fresh = (newestSnapshot().warnings ?? []).filter(({ id }) => !shown.includes(id));
  if (!fresh.length) return;
  for (const { lines, command } of fresh) {
    const [title, text] = lines.map(lineText);
    const detail = [text, command].filter(Boolean).join("\n\n");
    toast("warn", `Warmgraph: ${title}`, detail, 20000);
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
