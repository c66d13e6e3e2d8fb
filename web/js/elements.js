/** Elements out of data, and what is shown brought up to date with them. */

import { words } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | undefined | null | false} Child */

/**
 * @template {Element} T
 * @param {T} element
 * @param {Record<string, any>} attributes undefined and false leave one out, true gives it no value
 * @param {Child[]} children texts become text nodes
 */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child || child === ""));
  return element;
}

/**
 * @param {string} name a tag, and our classes after dots: "p.note" has the class warmgraph-note
 * @param {...(Child | Record<string, any>)} rest attributes, if there are any, and children
 */
export function el(name, ...rest) {
  const [tag, ...looks] = name.split(".");
  const [first] = rest;
  const given = first && typeof first === "object" && !(first instanceof Node) ? rest.shift() : {};
  const look = looks.map((each) => `warmgraph-${each}`).join(" ") || undefined;
  return fill(document.createElement(tag), { class: look, ...given }, rest);
}

/** A part of the tab, below its heading. */
export function section(key, ...children) {
  const id = `warmgraph-${key}`;
  const heading = el("h3", { id }, words(`page.${key}`));
  return el("section", { "data-key": key, "aria-labelledby": id }, heading, ...children);
}

/** @param {[string, string][]} actions and what their buttons say */
export function buttons(actions, attributes = () => ({})) {
  return el("div.buttons", ...actions.map(([action, label]) => button(action, label, attributes(action))));
}

/** @param {...Child} children */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A button that says what it does by name; who shows it listens for clicks. */
export function button(action, label, attributes = {}) {
  const own = { type: "button", class: "warmgraph-button", "data-action": action };
  return el("button", { ...own, ...attributes }, label);
}

/**
 * A bar with its text in it.
 * @param {number} done from 0 to 100
 */
export function progressBar(done, text, attributes = {}) {
  return el(
    "div",
    {
      class: "warmgraph-progress",
      role: "progressbar",
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-valuenow": Math.round(done),
      "aria-valuetext": text,
      ...attributes,
    },
    el("div.fill", { style: `width: ${done.toFixed(1)}%` }),
    el("span", text),
  );
}

function keyOf(node) {
  return `${node.nodeName} ${/** @type {any} */ (node).dataset?.key ?? ""}`;
}

/**
 * Make what is shown equal to `next`, keeping every element that stays: its focus, its scrolling,
 * and whether the user opened it.
 */
export function update(shown, next) {
  if (shown.nodeType === Node.TEXT_NODE) {
    if (shown.data !== next.data) shown.data = next.data;
    return;
  }
  for (const { name, value } of [...next.attributes])
    if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  for (const { name } of [...shown.attributes])
    if (!next.hasAttribute(name) && name !== "open") shown.removeAttribute(name);
  const wanted = [...next.childNodes];
  const keys = new Set(wanted.map(keyOf));
  for (const child of [...shown.childNodes]) if (!keys.has(keyOf(child))) child.remove();
  for (const [place, child] of wanted.entries()) {
    const there = shown.childNodes[place];
    if (there && keyOf(there) === keyOf(child)) update(there, child);
    else shown.insertBefore(child, there ?? null);
  }
  while (shown.childNodes.length > wanted.length) shown.lastChild.remove();
}
