/** A dialog of ours over the page: the host's own shows nothing but components of its framework. */
import { button, el } from "./elements.js";
import { words } from "./words.js";

/**
 * @param {string} title
 * @param {import("./elements.js").Child[]} body
 * @param {Record<string, [string, () => void]>} [actions] more buttons: what each says, and does
 * @returns {HTMLDialogElement} closed by its button, by Escape and by a click beside it
 */
export function openDialog(title, body, actions = {}) {
  const heading = el("h2", { id: "warmgraph-dialog-title" }, title);
  const made = Object.entries(actions).map(([name, [label]]) => button(name, label));
  const dialog = /** @type {HTMLDialogElement} */ (
    el(
      "dialog",
      { class: "warmgraph-report", "aria-labelledby": heading.id },
      heading,
      ...body,
      el(
        "div",
        { class: "warmgraph-buttons" },
        ...made,
        button("close", words("page.close"), { autofocus: true }),
      ),
    )
  );
  dialog.addEventListener("click", ({ target }) => {
    const { action = "" } = /** @type {HTMLElement} */ (target).dataset;
    actions[action]?.[1]();
    if (action === "close" || target === dialog) dialog.close();
  });
  dialog.addEventListener("keydown", (event) => event.stopPropagation()); // the canvas has shortcuts
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
