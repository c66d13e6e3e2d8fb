/** The tab's button that compares. */
import { button, el } from "./elements.js";
import { words } from "./words.js";

export function compareButton({ models = [] }, busy) {
  if (!models.length) return undefined;
  const attributes = { disabled: busy.has("compare"), title: words("page.compare_hint") };
  const label = words("page.compare_command");
  return el("div.buttons", button("compare", label, attributes));
}
