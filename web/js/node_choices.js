/** What the choices of our nodes' widgets are called. Workflows and prompts keep the choices' own names. */
import { app } from "../../../scripts/app.js";
import { words } from "./words.js";

/** Widgets whose choices have other names for people. */
const NAMED = ["when_missing", "backend", "form"];

function labelOf(widget, value) {
  const own = String(value ?? "");
  return words(`page.option_${widget}_${own.replaceAll(" ", "_")}`, {}, own);
}

app.registerExtension({
  name: "Warmgraph.Node.Choices",
  nodeCreated(node) {
    if (!String(node.comfyClass).startsWith("Warmgraph")) return;
    for (const widget of node.widgets ?? [])
      if (NAMED.includes(widget.name) && widget.options)
        widget.options.getOptionLabel = (value) => labelOf(widget.name, value);
  },
});
