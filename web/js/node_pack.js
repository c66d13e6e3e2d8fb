/** Every node of ours names its pack and version: who opens a workflow without them can find them. */
import { app } from "../../../scripts/app.js";
import { isOurs } from "./graph_places.js";

/** As the registry of packs knows it; a workflow that has other values keeps them. */
const PACK = { cnr_id: "warmgraph", ver: "0.1.0" };

app.registerExtension({
  name: "Warmgraph.Node.Pack",
  nodeCreated(node) {
    if (isOurs(node)) node.properties = { ...PACK, ...node.properties };
  },
});
