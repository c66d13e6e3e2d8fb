/** What a user can mend, with the command that mends it. */
import { button, el } from "./elements.js";
import { words } from "./words.js";

/**
 * A warning in the page's language; the server's own is English.
 * @param {{id: string, title: string, text: string, values?: Record<string, string>}} warning
 */
export function warningTexts({ id, title, text, values = {} }) {
  const key = `warnings.${id.replaceAll("-", "_")}`;
  return { title: words(`${key}_title`, values, title), text: words(key, values, text) };
}

/** @param {Record<string, any>} snapshot */
export function warningsSection({ warnings = [] }) {
  if (!warnings.length) return undefined;
  return el(
    "section",
    { "data-key": "warnings", "aria-labelledby": "warmgraph-warnings" },
    el("h3", { id: "warmgraph-warnings" }, words("page.warnings")),
    ...warnings.map(card),
  );
}

function card(warning) {
  const { title, text } = warningTexts(warning);
  const { command } = warning;
  const icon = warning.severity === "error" ? "pi-times-circle" : "pi-exclamation-triangle";
  return el(
    "article",
    { class: "warmgraph-card warmgraph-warning", "data-key": warning.id },
    el("h4", {}, el("i", { class: `pi ${icon}`, "aria-hidden": "true" }), title),
    el("p", {}, text),
    command &&
      el(
        "div",
        { class: "warmgraph-command" },
        el("code", {}, command),
        button("copy", words("page.copy"), { "data-text": command }),
      ),
  );
}
