/** The whole report of a model in a dialog of its own. */
import { copy } from "./asking.js";
import { button, el } from "./elements.js";
import { words } from "./words.js";

/**
 * @param {string} title
 * @param {string} text
 */
export function showFullReport(title, text) {
  const heading = el("h2", { id: "warmgraph-report-title" }, title);
  const dialog = /** @type {HTMLDialogElement} */ (
    el(
      "dialog",
      { class: "warmgraph-report", "aria-labelledby": heading.id },
      heading,
      el("pre", { tabindex: 0 }, text),
      el(
        "div",
        { class: "warmgraph-buttons" },
        button("copy", words("page.copy")),
        button("close", words("page.close"), { autofocus: true }),
      ),
    )
  );
  dialog.addEventListener("click", ({ target }) => {
    const action = /** @type {HTMLElement} */ (target).dataset.action;
    if (action === "copy") void copy(text);
    if (action === "close" || target === dialog) dialog.close();
  });
  dialog.addEventListener("keydown", (event) => event.stopPropagation()); // the canvas has shortcuts
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
