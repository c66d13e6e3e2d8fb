/** Ask the server to do something, ask the user whether it should, and say what came of it. */
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { showToast } from "./frontend.js";
import { lineText, words } from "./words.js";

/**
 * @param {"success" | "warn" | "error"} severity
 * @param {number} [life] milliseconds; without it the user closes it
 */
export function toast(severity, summary, detail, life) {
  showToast({ severity, summary, detail, life });
}

/**
 * @param {Record<string, string | number | boolean>} body
 * @returns {Promise<Record<string, any> | undefined>} undefined when it was refused, which is shown
 */
export async function post(route, body) {
  try {
    const response = await api.fetchApi(route, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    const answer = await response.json().catch(() => ({}));
    if (response.ok) return answer;
    const { line, error } = answer; // the host's own are objects
    const why = line ? lineText(line) : (error?.message ?? error ?? response.statusText);
    toast("error", words("page.refused"), why, 12000);
  } catch {
    toast("error", words("page.refused"), words("page.no_answer"), 12000);
  }
  return undefined;
}

/**
 * @param {string} message what will happen
 * @returns {Promise<boolean>}
 */
export async function confirmed(title, message) {
  const dialog = app.extensionManager?.dialog;
  if (!dialog?.confirm) return window.confirm(`${title}\n\n${message}`);
  return (await dialog.confirm({ title, message, type: "delete" })) === true;
}

/** Copy a text; pages over plain HTTP from another machine have no clipboard of their own. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast("success", words("page.copied"), undefined, 2000);
}

/** @param {string} name of the file */
export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
