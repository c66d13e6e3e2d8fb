/** Compile Model is the first of what the host's search finds equally good: the others come after it. */
import { app } from "../../../scripts/app.js";
import { rankFirst } from "./frontend.js";
import { KINDS } from "./make_faster.js";

app.registerExtension({
  name: "Warmgraph.Node.Search",
  addCustomNodeDefs: (definitions) => rankFirst(definitions[KINDS.model]),
});
