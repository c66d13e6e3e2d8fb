/** Badges of our nodes, and of the nodes of subgraphs that hold some, at every level. */
import { app } from "../../../scripts/app.js";
import { badgeOf } from "./badges.js";
import { allNodes, isOpen, isOurs, nodeAt, placesOf } from "./graph_places.js";
import { newestSnapshot } from "./reports.js";
import { ourTab } from "./sidebar_icon.js";

/** White stands out on each, whatever the page's colours. */
const COLOURS = { attention: "#7a4300", busy: "#1e40af", good: "#14532d", plain: "#404040" };

/** @type {WeakMap<any, any>} the host's badge of a node */
const badges = new WeakMap();

/** @type {[any, Record<string, any>[]][]} our nodes, and the reports that each shows */
let shown = [];

/**
 * @param {string} id of a report
 * @returns {any} one of our nodes in the open workflow that shows it
 */
export function nodeShowing(id) {
  return shown.find(([, reports]) => reports.some((report) => report.id === id))?.[0];
}

/** @param {typeof shown} now */
export function drawBadges(now) {
  shown = now;
  const { models = [], warnings = [] } = newestSnapshot();
  /** @type {Map<any, Set<Record<string, any>>>} */
  const held = new Map();
  const hold = (place, reports) => {
    const ids = place.split(":");
    for (let last = 1; last <= ids.length; last++) {
      const node = nodeAt(ids.slice(0, last).join(":"));
      held.set(node, new Set([...(held.get(node) ?? []), ...reports]));
    }
  };
  for (const [node, reports] of shown) placesOf(node).forEach((place) => hold(place, reports));
  for (const report of models)
    for (const at of report.by === "setting" ? report.nodes : []) if (isOpen(at)) hold(at.node, [report]);
  for (const node of allNodes()) {
    const said = badgeOf([...(held.get(node) ?? [])], warnings.length > 0);
    const badge = badges.get(node) ?? (said && addBadge(node));
    if (badge) Object.assign(badge, { text: said?.text ?? "", bgColor: COLOURS[said?.tone] ?? "" });
  }
  const tab = ourTab();
  if (tab) tab.badgesDrawn = (tab.badgesDrawn ?? 0) + 1;
  app.canvas?.setDirty(true, true);
}

/** The newer nodes read badges once, and again after a change of what a badge asks for. */
function addBadge(node) {
  const Badge = /** @type {any} */ (window).LGraphBadge;
  if (!Badge || !Array.isArray(node.badges)) return undefined;
  const badge = new Badge({ text: "", fgColor: "#ffffff" });
  badges.set(node, badge);
  node.badges.push(() => (ourTab()?.badgesDrawn, badge));
  return badge;
}

app.registerExtension({
  name: "Warmgraph.Node.Badge",
  /** Before the newer nodes read them. */
  nodeCreated(node) {
    if (node.isSubgraphNode?.() || isOurs(node)) addBadge(node);
  },
});
