/** What this day's runs saved, from what was measured both ways; nothing where that is nothing. */
import { el } from "./elements.js";
import { number } from "./format.js";
import { words } from "./words.js";

const MINUTE = 60;
const HOUR = 60 * MINUTE;
/** From so many of a unit on, the next larger one is left alone. */
const FEW = 1.5;

function timeText(seconds) {
  if (seconds >= FEW * HOUR) return words("page.hours", { number: number(seconds / HOUR, 1) });
  if (seconds >= FEW * MINUTE) return words("page.minutes", { number: number(seconds / MINUTE) });
  return words("page.seconds", { number: number(seconds) });
}

export function savedLine({ saved_today: saved }) {
  if (!(saved?.seconds >= 1)) return undefined;
  const values = { time: timeText(saved.seconds), count: saved.runs };
  return el("p.saved", { "data-key": "saved" }, words("page.saved_today", values));
}
