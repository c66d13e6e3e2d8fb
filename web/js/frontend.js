/**
 * What Warmgraph relies on of the host's page beside its documented calls, and where frontends
 * differ. Nothing else in this folder names an element, a class or a test id of the host's; the
 * stylesheet may name those of `ELEMENTS`.
 */
import { app } from "../../../scripts/app.js";
import { button } from "./elements.js";

/** Elements of the host's, by what they are for here. */
const ELEMENTS = {
  /** Frontends until 1.55 have these; later ones put buttons into toasts themselves. */
  toasts: ".p-toast",
  toastText: ".p-toast-message-text",
  /** What went wrong in a run; older toasts lie in the same place. */
  errors: '[data-testid="error-overlay"]',
  /** All of the page but what lies over it: dialogs, menus. */
  page: "#vue-app",
  dialog: '[role="dialog"]:not(.warmgraph-report)',
  /** Nodes 2.0, which have colours of their own. */
  newerNode: "[data-node-id]",
};

/**
 * @typedef {{
 *   severity: "success" | "info" | "warn" | "error", summary: string, detail?: string, life?: number,
 * }} Said life in milliseconds; without it the user closes it
 */

/** @param {boolean} isInert whether keys and the mouse reach nothing in the page but dialogs */
export function setPageInert(isInert) {
  document.querySelector(ELEMENTS.page)?.toggleAttribute("inert", isInert);
}

/** Whether a dialog of the host's is open. */
export function hasOpenDialog() {
  return [...document.querySelectorAll(ELEMENTS.dialog)].some((each) => each.checkVisibility());
}

let made = 0;

/** Milliseconds in which the page gets its place for toasts as it opens. */
const OPENING = 60000;

const nextFrame = () => new Promise((resolve) => requestAnimationFrame(resolve));

/**
 * @param {Said} said
 * @param {string} [label] of a button
 * @param {() => void} [act] what it does; the toast goes when it is pressed
 */
export function showToast(said, label, act) {
  const toasts = app.extensionManager?.toast;
  const { severity, summary, detail, life } = said;
  const kind = severity === "warn" ? "warning" : severity;
  if (typeof toasts?.[kind] !== "function") return void olderToast(toasts, said, label, act);
  const pressed = () => {
    toasts.dismiss(id);
    act();
  };
  const id = toasts[kind](summary, {
    description: detail,
    duration: life,
    action: label && { label, onClick: pressed },
  });
}

/** Older toasts hold texts alone: the button goes into the element, once that is there. */
async function olderToast(toasts, said, label, act) {
  made += 1;
  const message = { ...said, styleClass: `warmgraph-toast-${made}` };
  // What is said before the page has a place for it is shown with what is said next.
  for (const end = Date.now() + OPENING; Date.now() < end; await nextFrame())
    if (document.querySelector(ELEMENTS.toasts)) break;
  toasts?.add(message);
  for (let frames = 0; label && frames < 60; frames += 1) {
    await nextFrame();
    const place = document.querySelector(`.${message.styleClass} ${ELEMENTS.toastText}`);
    if (!place) continue;
    const own = button("toast", label);
    own.addEventListener("click", () => {
      toasts.remove(message);
      act();
    });
    return place.append(own);
  }
}

/** Of a search's last figure, which is small where a whole word is what was typed. */
const WHOLE = 0.2;

/**
 * Have the node search list a node before others that match as well. Its figures are compared from
 * the first on: how a name matches, how often nodes are used, and more.
 * @param {any} [definition] as the server gave it; what it has the page's own copy has, too
 */
export function rankFirst(definition) {
  if (!definition) return;
  definition.postProcessSearchScores = ([match, ...more]) => [
    match,
    more[more.length - 1] < WHOLE ? -Infinity : 0,
    ...more,
  ];
}

/** A copy of a link, which stays as it is when the link goes. */
function copyOf(link) {
  const { origin_id, origin_slot, target_id, target_slot, parentId } = link;
  return { origin_id, origin_slot, target_id, target_slot, parentId };
}

/**
 * Links at one end of which is a slot; what slots themselves say of theirs is deprecated since 1.57.
 * Ids are numbers in one frontend and texts in another.
 */
function linksAt(node, slot, end) {
  const isThere = (link) => link[`${end}_slot`] === slot && String(link[`${end}_id`]) === String(node.id);
  return [...(node?.graph?.links.values() ?? [])].filter(isThere).map(copyOf);
}

/** @param {any} graph @param {any} id @returns {any} undefined where there is none */
export function linkWith(graph, id) {
  const link = graph?.getLink(id);
  return link && copyOf(link);
}

/** @param {any} node @param {any} input one of its inputs @returns {any} the link that ends there */
export function linkInto(node, input) {
  return linksAt(node, node?.inputs?.indexOf(input), "target")[0];
}

/** @param {any} node @param {any} output one of its outputs @returns {any[]} the links that begin there */
export function linksFrom(node, output) {
  return linksAt(node, node.outputs.indexOf(output), "origin");
}
