/** What a badge says of models, in a few words: plain data out of reports. */
import { percent } from "./format.js";
import { words } from "./words.js";

/** Which badge is shown where several are true, the first first, and how it looks. */
const TONES = {
  attention: "attention",
  slower: "attention",
  unused: "attention",
  paused: "busy",
  compiling: "busy",
  faster: "good",
  ready: "good",
  same: "plain",
  normal: "plain",
};

/**
 * @param {Record<string, any>[]} reports of the models that a node attached, or those within it
 * @param {boolean} isWarned whether there is something that a user can mend
 * @returns {{text: string, tone: string} | undefined}
 */
export function badgeOf(reports, isWarned) {
  const kindOf = ({ id, stage, building }) => {
    if (stage === "normal" || !id) return isWarned ? "attention" : "normal";
    if (stage === "compiling" && building.paused) return "paused";
    return stage;
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
  const sorted = [...reports].sort((a, b) => b.factor - a.factor);
  return [...new Set(sorted.map(({ times }) => `${times}x`))].join(", ");
}
