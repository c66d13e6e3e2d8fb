/**
 * A dialog of ours over the page: the host's own shows nothing but components of its framework. It
 * is no modal one, which would lie over the host's dialogs as well, whenever those come.
 */
import { button, el } from "./elements.js";
import { hasOpenDialog, setPageInert } from "./frontend.js";
import { words } from "./words.js";

/**
 * @param {import("./elements.js").Child[]} body
 * @param {Record<string, [string, () => void]>} [actions] more buttons: what each says, and does
 * @returns {HTMLDialogElement} closed by its button, by Escape and by a click beside it
 */
export function openDialog(title, body, actions = {}) {
  const heading = el("h2", { id: "warmgraph-dialog-title" }, title);
  const made = Object.entries(actions).map(([name, [label]]) => button(name, label));
  const dialog = /** @type {HTMLDialogElement} */ (
    el(
      "dialog.report",
      { "aria-labelledby": heading.id },
      heading,
      ...body,
      el("div.buttons", ...made, button("close", words("page.close"), { autofocus: true })),
    )
  );
  const back = el("div.back", dialog);
  const closed = new AbortController();
  dialog.addEventListener("close", () => {
    closed.abort();
    back.remove();
    if (!document.querySelector(".warmgraph-back")) setPageInert(false);
  });
  back.addEventListener("click", ({ target }) => {
    const { action = "" } = /** @type {HTMLElement} */ (target).dataset;
    actions[action]?.[1]();
    if (action === "close" || target === back) dialog.close();
  });
  const keys = (event) => {
    if (hasOpenDialog()) return;
    event.stopImmediatePropagation(); // the canvas has shortcuts
    if (event.key === "Escape") dialog.close();
  };
  window.addEventListener("keydown", keys, { capture: true, signal: closed.signal });
  document.body.append(back);
  setPageInert(true);
  if (hasOpenDialog())
    dialog.setAttribute("open", ""); // the focus stays in the host's
  else dialog.show();
  return dialog;
}
