/**
 * Take the words from where the host serves those of all packs, and the language from its settings.
 * Whoever imports this finds them there.
 */
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { useWords } from "./words.js";

const response = await api.fetchApi("/i18n").catch(() => undefined);
const all = response?.ok ? await response.json() : {};
useWords(all, () => app.extensionManager?.setting?.get("Comfy.Locale"));

/** @param {AbortSignal} signal */
export function watchLanguage(changed, signal) {
  const later = () => queueMicrotask(changed); // the host tells of it before it has taken it
  app.ui.settings.addEventListener("Comfy.Locale.change", later, { signal });
}
