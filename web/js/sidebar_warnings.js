/** What a user can mend, with the command that mends it. */
import { button, el, section } from "./elements.js";
import { lineText, words } from "./words.js";

export function warningsSection({ warnings = [] }) {
  if (!warnings.length) return undefined;
  return section("warnings", ...warnings.map(card));
}

function card({ id, lines, command }) {
  const [title, text] = lines.map(lineText);
  return el(
    "article",
    { class: "warmgraph-card warmgraph-warning", "data-key": id },
    el("h4", el("i", { class: "pi pi-exclamation-triangle", "aria-hidden": "true" }), title),
    el("p", text),
    command &&
      el("div.command", el("code", command), button("copy", words("page.copy"), { "data-text": command })),
  );
}
