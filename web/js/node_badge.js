/**
 * The badge of a node whose model runs as a whole as without it, on the classic canvas. The newer
 * nodes read their badges only once; what stands in the box says the same.
 */
import { words } from "./words.js";

/** Legible on each other, whatever the page's colours. */
const COLOURS = { fgColor: "#ffffff", bgColor: "#7a4300" };

/**
 * @param {any} node
 * @param {boolean} shown
 */
export function setBadge(node, shown) {
  const Badge = /** @type {any} */ (window).LGraphBadge;
  if (!Badge || !Array.isArray(node.badges)) return;
  const text = `⚠ ${words("page.badge_eager")}`;
  const ours = node.badges.find((badge) => badge.isWarmgraph);
  if (ours) ours.text = shown ? text : "";
  else if (shown) {
    const badge = Object.assign(new Badge({ text, ...COLOURS }), { isWarmgraph: true });
    node.badges.push(badge);
  } else return;
  node.setDirtyCanvas?.(true, true);
}
