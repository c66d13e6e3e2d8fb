/** Numbers, sizes and times as people read them. */
import { language } from "./words.js";

/**
 * @param {number} [digits] behind the point, at most
 * @param {number} [least] of those, also where they are zeros
 */
export function number(value, digits = 0, least = 0) {
  const style = { minimumFractionDigits: least, maximumFractionDigits: digits };
  return new Intl.NumberFormat(language(), style).format(value);
}

/** @param {number} count bytes */
export function bytes(count) {
  if (count >= 2 ** 30) return `${number(count / 2 ** 30, 1)} GiB`;
  return `${number(count / 2 ** 20, count < 10 * 2 ** 20 ? 1 : 0)} MiB`;
}

/** Of a step, with the digits that the server's sentences have. */
export function duration(ms) {
  if (ms >= 1000) return `${number(ms / 1000, 2, 2)} s`;
  const digits = ms < 10 ? 1 : 0;
  return `${number(ms, digits, digits)} ms`;
}

/** @param {number} seconds since 1970 */
export function time(seconds) {
  const style = { month: "numeric", day: "numeric", hour: "numeric", minute: "numeric" };
  return new Intl.DateTimeFormat(language(), style).format(new Date(seconds * 1000));
}

/** @returns {number} from 0 to 100 */
export function percent(part, whole) {
  return whole > 0 ? Math.min(100, Math.max(0, (100 * part) / whole)) : 0;
}
