import assert from "node:assert/strict";
import { test } from "node:test";

import { badgeOf } from "../../web/js/badges.js";
import { useWords } from "../../web/js/words.js";

const PAGE = {
  badge_attention: "⚠ attention", badge_compiling: "compiling {percent} %", badge_faster: "{factors}",
  badge_normal: "normal", badge_paused: "paused", badge_ready: "ready", badge_same: "about as fast",
  badge_slower: "⚠ {factors}", badge_unused: "⚠ not used",
}; // prettier-ignore
useWords({ en: { warmgraph: { page: PAGE } } }, () => "en");

const FAST = { id: "a", stage: "faster", factor: 3.02, times: "3.0" };
const SAME = { id: "s", stage: "same", factor: 0.98, times: "1.0" };
const SLOW = { id: "c", stage: "slower", factor: 0.2, times: "0.2" };
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

test("only what is faster is green, and the factor is the server's text", () => {
  const toned = (report) => Object.values(badgeOf([report], false));
  assert.deepEqual(toned(FAST), ["3.0x", "good"]);
  assert.deepEqual(toned({ ...FAST, factor: 1.25, times: "1.3" }), ["1.3x", "good"]);
  assert.deepEqual(toned(SAME), ["about as fast", "plain"]);
  assert.deepEqual(toned(SLOW), ["⚠ 0.2x", "attention"]);
});

test("a model that no sampler used says so", () => {
  const unused = { id: "u", stage: "unused", factor: null, times: null };
  assert.deepEqual(badgeOf([unused, FAST], false), { text: "⚠ not used", tone: "attention" });
});

test("what asks for its user goes before everything else", () => {
  assert.equal(text(FAST, SAME, SLOW), "⚠ 0.2x");
  assert.equal(badgeOf([{ id: "c", stage: "normal" }], true).text, "⚠ attention");
  assert.equal(badgeOf([FAST], true).text, "3.0x");
});

test("a subgraph of several models says what of them matters most", () => {
  assert.equal(text(FAST, BUSY), "compiling 40 %");
  assert.equal(text(FAST, { id: "v", stage: "normal" }), "3.0x");
  const slower = { ...FAST, factor: 1.4, times: "1.4" };
  assert.equal(text(slower, FAST, SAME, { ...FAST, factor: 3.04 }), "3.0x, 1.4x");
});
