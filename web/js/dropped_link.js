/** Compile Model in the menu that opens where a link from a model's output is dropped. */
import { app } from "../../../scripts/app.js";
import { KINDS } from "./make_faster.js";

/** The host makes its list anew when this setting changes. */
const SUGGESTIONS = "Comfy.NodeSuggestions.number";

/** Entries of the host's are names of classes; one with a text of its own shows that. */
function offer() {
  for (const [kind, name] of Object.entries(KINDS)) {
    const entries = LiteGraph.slot_types_default_out[kind.toUpperCase()];
    const title = LiteGraph.registered_node_types[name]?.title;
    if (!Array.isArray(entries) || entries.some(({ node }) => node === name)) continue;
    entries.push({ node: name, title, content: title });
  }
}

app.registerExtension({
  name: "Warmgraph.Link.Dropped",
  setup() {
    offer();
    app.ui.settings.addEventListener(`${SUGGESTIONS}.change`, () => queueMicrotask(offer));
  },
});
