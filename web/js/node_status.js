/**
 * The text on our nodes: what runs compiled, what is being built, what is eager and why.
 * It comes with the node's result, or from the server, which knows what each node attached last, and
 * is kept live by the server's event.
 */
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { BYPASSED, MUTED } from "./graph_edit.js";
import { allNodes, isInside, placesOf } from "./graph_places.js";
import { watchLanguage } from "./locale.js";
import { drawBadges } from "./node_badge.js";
import { makeBox } from "./node_text.js";
import { openingReports, reportOf, reportsAt, watchReports } from "./reports.js";
import { linesOf, words } from "./words.js";

/** Least size of the text in pixels, and the part of the report that each node shows. */
const NODES = {
  WarmgraphCompileModel: { width: 300, height: 80, whole: false },
  WarmgraphCompileVAE: { width: 300, height: 80, whole: false },
  WarmgraphLoadCompiledGraphVAE: { width: 300, height: 80, whole: false },
  WarmgraphLoadCompiledGraph: { width: 300, height: 80, whole: false },
  WarmgraphCompileControlNet: { width: 300, height: 80, whole: false },
  WarmgraphDeepCache: { width: 300, height: 130, whole: false },
  WarmgraphStepCache: { width: 300, height: 130, whole: false },
  WarmgraphGraphReport: { width: 400, height: 260, whole: true },
  WarmgraphWarmUp: { width: 400, height: 140, whole: true },
};

/** Space that the host leaves above and below a widget's element, in pixels each. */
const MARGIN = 10;

/**
 * @typedef {{
 *   take: (output: any) => void, draw: () => void, ended: () => void, close: () => void,
 *   reports: () => any[],
 * }} Status
 */

/** @type {Map<any, Status>} our nodes of the open workflow */
const statuses = new Map();

/**
 * The box has a height of its own and the text scrolls in it: new text never resizes the node,
 * which the page would take for a change of the workflow.
 */
function addStatus(node, look) {
  const { box, showText, showProgress, showReports } = makeBox(look.height - 2 * MARGIN, look.whole);
  const closed = new AbortController();
  /** @type {{id: string, text: string}[]} the node's result; newer reports go before it */
  let parts = [];
  let isProgress = false; // what is shown is a line of it: it stays until there is something newer

  /** What is known of the node: what has no id is no model's, and stays as it came with the rest. */
  const reports = () => {
    const live = parts.filter(({ id }) => !id || reportOf(id));
    const isKnown = live.length === parts.length || live.some(({ id }) => id);
    if (live.length && isKnown) return live.map((part) => reportOf(part.id) ?? part);
    return reportsAt(workflowOf(node), placesOf(node));
  };
  const draw = () => {
    const shown = reports();
    isProgress = false;
    const idle = (shown.length || parts.length) && idleness(node, look.whole);
    if (idle) return showText(words(idle));
    if (!shown.length) return showText(words(parts.length ? "page.gone" : "page.not_run"));
    showReports(
      shown,
      shown.every(({ id, standing }) => !id || standing === "eager"),
    );
  };
  watchReports((progress) => {
    if (!progress) return void ((!isProgress || reports().length) && draw());
    if (!placesOf(node).includes(progress.node)) return;
    showProgress(linesOf(progress));
    isProgress = true;
  }, closed.signal);
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
    draw();
    showBadges();
  };
  statuses.set(node, {
    take,
    draw: () => isProgress || draw(),
    ended: draw,
    close: () => closed.abort(),
    reports: () => (look.whole || idleness(node, false) ? [] : reports()),
  });
  chain(node, "onExecuted", take);
  chain(node, "onRemoved", () => {
    closed.abort();
    statuses.delete(node);
  });
}

/**
 * Why a node does nothing in the next run, whatever it did before: the key of a text.
 * @param {boolean} isLast whether nothing has to come after it
 */
function idleness(node, isLast) {
  if ([MUTED, BYPASSED].includes(node.mode)) return "page.left_out";
  if (!isLast && !node.outputs?.some((_, slot) => node.isOutputConnected(slot))) return "page.not_linked";
  return undefined;
}

/** The host does not say of nodes inside subgraphs that they went with their workflow. */
function forgetOthers() {
  const here = new Set(allNodes());
  for (const [node, { close }] of statuses) {
    if (here.has(node)) continue;
    close();
    statuses.delete(node);
  }
}

function showBadges() {
  const here = allNodes().filter((node) => statuses.has(node));
  drawBadges(here.map((node) => [node, statuses.get(node).reports()]));
}

function redraw(how) {
  for (const status of statuses.values()) status[how]();
  showBadges();
}

/** Call `then` after whatever the node does already. */
function chain(node, event, then) {
  const earlier = node[event];
  node[event] = function (...values) {
    earlier?.apply(this, values);
    then(...values);
  };
}

/** The page's name for a node: "7", or "SUBGRAPH:3" inside a subgraph. */
function locatorOf(node) {
  return isInside(node.graph) ? `${node.graph.id}:${node.id}` : String(node.id);
}

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
  async setup() {
    const { signal } = new AbortController();
    watchReports((progress) => progress || showBadges(), signal);
    api.addEventListener("graphChanged", () => redraw("draw"));
    for (const end of ["execution_success", "execution_error", "execution_interrupted"])
      api.addEventListener(end, () => redraw("ended"));
    await openingReports();
  },
  nodeCreated(node) {
    const look = NODES[node.comfyClass];
    if (look) addStatus(node, look);
  },
  /** The reports may come later than the workflow. */
  async afterConfigureGraph() {
    forgetOthers();
    await openingReports();
    redraw("draw");
  },
  /** The page brings results back when the user returns to a workflow's tab. */
  onNodeOutputsUpdated(outputs) {
    for (const [node, { take }] of statuses) take(outputs?.[locatorOf(node)]);
  },
});
