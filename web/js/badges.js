/** What a badge says of models, in a few words: plain data out of reports. */
import { percent, tenths } from "./format.js";
import { words } from "./words.js";

/** Which badge is shown where several are true, the first first, and how it looks. */
const TONES = {
  attention: "attention",
  paused: "busy",
  compiling: "busy",
  factor: "good",
  ready: "good",
  normal: "plain",
};

/**
 * @param {Record<string, any>[]} reports of the models that a node attached, or those within it
 * @param {boolean} isWarned whether there is something that a user can mend
 * @returns {{text: string, tone: string} | undefined}
 */
export function badgeOf(reports, isWarned) {
  const kindOf = ({ id, stage, factor, building }) => {
    if (stage === "slower") return "attention";
    if (stage === "normal" || !id) return isWarned ? "attention" : "normal";
    if (stage === "compiling" && building.paused) return "paused";
    return factor ? "factor" : stage;
  };
  const kinds = reports.map(kindOf);
  const kind = Object.keys(TONES).find((each) => kinds.includes(each));
  if (!kind) return undefined;
  const those = reports.filter((_, place) => kinds[place] === kind);
  const share = Math.floor(percent(those[0].building?.fraction, 1));
  const text = words(`page.badge_${kind}`, { percent: share, factors: factorsOf(those) });
  return { text, tone: TONES[kind] };
}

function factorsOf(reports) {
  const factors = reports.map(({ factor }) => factor).sort((a, b) => b - a);
  return [...new Set(factors.map((each) => `${tenths(each)}x`))].join(", ");
}
