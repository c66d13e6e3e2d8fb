import assert from "node:assert/strict";
import { test } from "node:test";

import { badgeOf } from "../../web/js/badges.js";
import { useWords } from "../../web/js/words.js";

const PAGE = {
  badge_attention: "⚠ attention", badge_compiling: "compiling {percent} %", badge_factor: "{factors}",
  badge_normal: "normal", badge_paused: "paused", badge_ready: "ready",
}; // prettier-ignore
useWords({ en: { warmgraph: { page: PAGE } } }, () => "en");

const FAST = { id: "a", stage: "faster", factor: 3.02 };
const BUSY = { id: "b", stage: "compiling", factor: null, building: { fraction: 0.409 } };
const text = (...reports) => badgeOf(reports, false)?.text;

test("a model says by how much it is faster, how far it is, or that it runs as ever", () => {
  assert.equal(text(FAST), "3.0x");
  assert.equal(text(BUSY), "compiling 40 %");
  assert.equal(text({ ...BUSY, building: { fraction: 0.4, paused: true } }), "paused");
  assert.equal(text({ id: "c", stage: "ready" }), "ready");
  assert.equal(text({ id: "c", stage: "normal" }), "normal");
  assert.equal(text({ id: "", text: "nothing was attached" }), "normal");
  assert.equal(text({ id: "c", stage: "waiting" }), undefined);
  assert.equal(text(), undefined);
});

test("what asks for its user goes before everything else", () => {
  assert.equal(text(FAST, { id: "c", stage: "slower", factor: 0.4 }), "⚠ attention");
  assert.equal(badgeOf([{ id: "c", stage: "normal" }], true).text, "⚠ attention");
  assert.equal(badgeOf([FAST], true).text, "3.0x");
});

test("a subgraph of several models says what of them matters most", () => {
  assert.equal(text(FAST, BUSY), "compiling 40 %");
  assert.equal(text(FAST, { id: "v", stage: "normal" }), "3.0x");
  assert.equal(text({ ...FAST, factor: 1.4 }, FAST, { ...FAST, factor: 3.04 }), "3.0x, 1.4x");
});
