/**
 * The text on our nodes: what runs compiled, what is being built, what is eager and why.
 * It comes with the node's result and is kept live by the server's event.
 */
import { app } from "../../../scripts/app.js";
import { openingReports, reportOf, watchReports } from "./reports.js";

/** Least size of the text in pixels, and the part of the report that each node shows. */
const NODES = {
  WarmgraphCompileModel: { width: 300, height: 80, part: "summary" },
  WarmgraphCompileVAE: { width: 300, height: 80, part: "summary" },
  WarmgraphLoadCompiledGraphVAE: { width: 300, height: 80, part: "summary" },
  WarmgraphLoadCompiledGraph: { width: 300, height: 80, part: "summary" },
  WarmgraphCompileControlNet: { width: 300, height: 80, part: "summary" },
  WarmgraphDeepCache: { width: 300, height: 130, part: "summary" },
  WarmgraphGraphReport: { width: 400, height: 260, part: "text" },
  WarmgraphWarmUp: { width: 400, height: 140, part: "text" },
};

/** Space that the host leaves above and below a widget's element, in pixels each. */
const MARGIN = 10;

const NOT_RUN = "Shown after the next run.";

/** @type {Map<any, (output: any) => void>} our nodes of the open workflow, and how each takes a result */
const takers = new Map();

/**
 * The box has a height of its own and the text scrolls in it: new text never resizes the node,
 * which the page would take for a change of the workflow.
 * @param {number} height
 */
function makeBox(height) {
  const box = document.createElement("div");
  box.className = "warmgraph-status";
  box.style.minHeight = `${height - 2 * MARGIN}px`;
  const text = document.createElement("div");
  text.textContent = NOT_RUN;
  box.append(text);
  return { box, text };
}

/**
 * The server names a node by its place in the prompt: "7", or "12:3" inside a subgraph.
 * @param {any} node
 * @param {string} place
 */
function isNode(node, place) {
  if (node.graph?.isRootGraph === false) return place.endsWith(`:${node.id}`);
  return place === String(node.id);
}

/**
 * @param {any} node
 * @param {{width: number, height: number, part: "summary" | "text"}} look
 */
function addStatus(node, look) {
  const { box, text } = makeBox(look.height);
  const closed = new AbortController();
  /** @type {{id: string, text: string}[]} what the text consists of; a report goes with its model */
  let parts = [];

  const show = (newest) => {
    if (newest && text.textContent !== newest) text.textContent = newest;
  };
  const refresh = (progress) => {
    if (progress) {
      if (isNode(node, progress.node)) show(progress.text);
      return;
    }
    if (!parts.some(({ id }) => reportOf(id))) return; // what is shown may be a line of progress
    for (const part of parts) part.text = reportOf(part.id)?.[look.part] || part.text;
    show(parts.map((part) => part.text).join("\n"));
  };
  watchReports(refresh, closed.signal);

  const widget = node.addDOMWidget("warmgraph_status", "warmgraph_status", box, {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: () => look.height,
  });
  widget.serialize = false; // leaves no slot among the stored widget values
  node.setSize([Math.max(node.size[0], look.width), node.computeSize()[1]]);

  const take = (output) => {
    if (!output?.warmgraph?.length) return;
    parts = output.warmgraph.map(({ id, text }) => ({ id, text }));
    show(parts.map((part) => part.text).join("\n"));
    refresh();
  };
  takers.set(node, take);
  chain(node, "onExecuted", take);
  chain(node, "onRemoved", () => {
    closed.abort();
    takers.delete(node);
  });
}

/**
 * Call `then` after whatever the node does already.
 * @param {any} node
 * @param {"onExecuted" | "onRemoved"} event
 * @param {(...values: any[]) => void} then
 */
function chain(node, event, then) {
  const earlier = node[event];
  node[event] = function (...values) {
    earlier?.apply(this, values);
    then(...values);
  };
}

/**
 * The page's name for a node: "7", or "SUBGRAPH:3" inside a subgraph.
 * @param {any} node
 */
function locatorOf(node) {
  return node.graph?.isRootGraph === false ? `${node.graph.id}:${node.id}` : String(node.id);
}

function addStylesheet() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("../warmgraph.css", import.meta.url).href;
  document.head.append(link);
}

app.registerExtension({
  name: "Warmgraph.Node.Status",
  init: addStylesheet,
  setup: openingReports,
  nodeCreated(node) {
    const look = NODES[node.comfyClass];
    if (look) addStatus(node, look);
  },
  /** The page brings results back when the user returns to a workflow's tab. */
  onNodeOutputsUpdated(outputs) {
    for (const [node, take] of takers) take(outputs?.[locatorOf(node)]);
  },
});
