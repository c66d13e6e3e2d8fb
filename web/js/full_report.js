/** The whole report of a model in a dialog of its own. */
import { copy } from "./asking.js";
import { openDialog } from "./dialog.js";
import { el } from "./elements.js";
import { words } from "./words.js";

export function showFullReport(title, text) {
  openDialog(title, [el("pre", { tabindex: 0 }, text)], {
    copy: [words("page.copy"), () => void copy(text)],
  });
}
