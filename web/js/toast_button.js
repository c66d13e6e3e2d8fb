/**
 * A toast with a button. The host's toasts hold texts alone, so the button is put into the toast's
 * element once that is there; where it is not found, the texts are all there is.
 */
import { app } from "../../../scripts/app.js";
import { button } from "./elements.js";

let made = 0;

/**
 * @param {{severity: "success" | "info" | "warn" | "error", summary: string, detail?: string, life?: number}} said
 * @param {string} label of the button
 * @param {() => void} act the toast goes when the button is pressed
 */
export async function toastWithButton(said, label, act) {
  const toasts = app.extensionManager?.toast;
  made += 1;
  const message = { ...said, styleClass: `warmgraph-toast-${made}` };
  toasts?.add(message);
  for (let frames = 0; frames < 60; frames += 1) {
    await new Promise((resolve) => requestAnimationFrame(resolve));
    const place = document.querySelector(`.${message.styleClass} .p-toast-message-text`);
    if (!place) continue;
    const pressed = () => {
      toasts.remove(message);
      act();
    };
    const own = button("toast", label);
    own.addEventListener("click", pressed);
    place.append(own);
    return;
  }
}
