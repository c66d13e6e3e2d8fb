/**
 * What the page says, in its user's language. The words are in the pack's locales/LANGUAGE/main.json,
 * below "warmgraph": "page" for these scripts' own, "lines" for what the server says, "reasons" for
 * those that stand in it.
 */

/** @type {Record<string, any>} by language, as the host serves them */
let translations = {};
let localeOf = () => "en";

/**
 * @param {Record<string, any>} all what the host's /i18n answers
 * @param {() => string | undefined} locale says the page's language, each time anew
 */
export function useWords(all, locale) {
  translations = all;
  localeOf = () => locale() || "en";
}

/** The page's language, for dates and numbers. */
export function language() {
  return localeOf();
}

function find(language, key) {
  let found = translations[language]?.warmgraph;
  for (const part of key.split(".")) found = found?.[part];
  return typeof found === "string" ? found : undefined;
}

/**
 * A text with its `{names}` filled in. "one | many" is chosen between by `values.count`.
 * @param {string} key below "warmgraph", like "page.store"
 * @param {Record<string, string | number>} [values]
 * @param {string} [fallback] shown where no language has the key
 */
export function words(key, values = {}, fallback = key) {
  let text = find(localeOf(), key) ?? find("en", key);
  if (text === undefined) return fallback;
  if ("count" in values) {
    const forms = text.split(" | ");
    text = Number(values.count) === 1 ? forms[0] : forms[forms.length - 1];
  }
  return text.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}

/**
 * A line that the server made: its own language is English.
 * @param {{key?: string, values?: Record<string, any>, reasons?: Record<string, any>, text: string}}
 *   line `reasons` are those of its values that are reasons
 */
export function lineText({ key, values, reasons, text }) {
  return key ? words(`lines.${key}`, { ...values, ...inWords(reasons) }, text) : text;
}

/**
 * A reason that the server gave: words, or a key and values, among which are other reasons.
 * @param {string | {key?: string, values?: Record<string, any>, text: string}} reason
 */
export function reasonText(reason) {
  if (typeof reason === "string") return reason;
  const { key, values, text } = reason;
  return key ? words(`reasons.${key}`, inWords(values), text) : text;
}

function inWords(values = {}) {
  return Object.fromEntries(Object.entries(values).map(([name, each]) => [name, reasonText(each)]));
}

/**
 * What a report, or a node's result, says on a node, a line each.
 * @param {{lines?: {key?: string, text: string}[], text?: string}} said
 */
export function linesOf({ lines, text = "" }) {
  return lines ?? text.split("\n").map((each) => ({ text: each }));
}

/**
 * All that a report says, in the page's language.
 * @param {{whole?: {key?: string, text: string}[], text?: string}} said
 */
export function wholeText({ whole, text = "" }) {
  return linesOf({ lines: whole, text }).map(lineText).join("\n");
}
