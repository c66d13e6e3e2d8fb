/**
 * The text on our nodes: what runs compiled, what is being built, what is eager and why.
 * It comes with the node's result and is kept live by the server's event.
 */
import { app } from "../../../scripts/app.js";
import { watchLanguage } from "./locale.js";
import { setBadge } from "./node_badge.js";
import { recall, remember } from "./node_memory.js";
import { makeBox } from "./node_text.js";
import { openingReports, reportOf, watchReports } from "./reports.js";
import { linesOf, words } from "./words.js";

/** Least size of the text in pixels, and the part of the report that each node shows. */
const NODES = {
  WarmgraphCompileModel: { width: 300, height: 80, whole: false },
  WarmgraphCompileVAE: { width: 300, height: 80, whole: false },
  WarmgraphLoadCompiledGraphVAE: { width: 300, height: 80, whole: false },
  WarmgraphLoadCompiledGraph: { width: 300, height: 80, whole: false },
  WarmgraphCompileControlNet: { width: 300, height: 80, whole: false },
  WarmgraphDeepCache: { width: 300, height: 130, whole: false },
  WarmgraphGraphReport: { width: 400, height: 260, whole: true },
  WarmgraphWarmUp: { width: 400, height: 140, whole: true },
};

/** Space that the host leaves above and below a widget's element, in pixels each. */
const MARGIN = 10;

/** @typedef {{take: (output: any) => void, restore: () => void}} Status */

/** @type {Map<any, Status>} our nodes of the open workflow */
const statuses = new Map();

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
 * The box has a height of its own and the text scrolls in it: new text never resizes the node,
 * which the page would take for a change of the workflow.
 * @param {any} node
 * @param {{width: number, height: number, whole: boolean}} look
 */
function addStatus(node, look) {
  const { box, showText, showProgress, showReports } = makeBox(look.height - 2 * MARGIN, look.whole);
  const closed = new AbortController();
  /** @type {{id: string, text: string}[]} the node's result; newer reports go before it */
  let parts = [];

  const draw = () => {
    if (!parts.length) return showText(words("page.not_run"));
    const eager = parts.every(({ id }) => !id || reportOf(id)?.standing === "eager");
    showReports(parts.map((part) => reportOf(part.id) ?? part), eager);
    setBadge(node, eager);
  };
  const refresh = (progress) => {
    if (!progress) {
      // What is shown may be a line of progress: it stays until there is something newer.
      if (parts.some(({ id }) => reportOf(id))) draw();
    } else if (isNode(node, progress.node)) showProgress(linesOf(progress));
  };
  watchReports(refresh, closed.signal);
  watchLanguage(draw, closed.signal);
  draw();

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
    parts = output.warmgraph;
    remember(workflowOf(node), locatorOf(node), parts.map(({ id }) => id));
    draw();
  };
  const restore = () => {
    const known = recall(workflowOf(node), locatorOf(node)).filter((id) => reportOf(id));
    if (parts.length || !known.length) return;
    parts = known.map((id) => ({ id, text: "" }));
    draw();
  };
  statuses.set(node, { take, restore });
  chain(node, "onExecuted", take);
  chain(node, "onRemoved", () => {
    closed.abort();
    statuses.delete(node);
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

/** @param {any} node */
function workflowOf(node) {
  return String(node.graph?.rootGraph?.id ?? app.rootGraph?.id);
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
  /** The reports may come later than the workflow. */
  async afterConfigureGraph() {
    await openingReports();
    for (const { restore } of statuses.values()) restore();
  },
  /** The page brings results back when the user returns to a workflow's tab. */
  onNodeOutputsUpdated(outputs) {
    for (const [node, { take }] of statuses) take(outputs?.[locatorOf(node)]);
  },
});
