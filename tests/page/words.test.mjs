import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import { bytes, duration, number } from "../../web/js/format.js";
import { language, lineText, linesOf, reasonText, useWords, wholeText, words } from "../../web/js/words.js";

const ALL = {
  en: {
    warmgraph: {
      page: { built: "{done} of {total} built", files: "1 file | {count} files", close: "Close" },
      lines: { speed_alone: "{now} a step" },
    },
    otherpack: { page: { close: "Shut" } },
  },
  zh: {
    warmgraph: {
      page: { built: "共 {total}，已完成 {done}", files: "{count} 个文件" },
      lines: { eager: "正常速度：{reason}" },
      reasons: { both: "{one}；{other}", patches: "其他节点修补了 {name}" },
    },
  },
  de: { otherpack: {} },
};

let locale = "en";
useWords(ALL, () => locale);
afterEach(() => {
  locale = "en";
});

test("names in braces are filled in, and those without a value stay", () => {
  assert.equal(words("page.built", { done: 3, total: 23 }), "3 of 23 built");
  assert.equal(words("page.built", { done: 0 }), "0 of {total} built");
});

test("a value is not looked through for names again", () => {
  assert.equal(words("page.built", { done: "{total}", total: 5 }), "{total} of 5 built");
});

test("the page's language comes first, then English, then the fallback, then the key", () => {
  locale = "zh";
  assert.equal(words("page.built", { done: 3, total: 23 }), "共 23，已完成 3");
  assert.equal(words("page.close"), "Close");
  assert.equal(words("page.nothing", {}, "as the server says"), "as the server says");
  assert.equal(words("page.nothing"), "page.nothing");
  for (const other of ["de", "xx"]) {
    locale = other;
    assert.equal(words("page.close"), "Close");
  }
});

test("what is not a text is no translation", () => {
  assert.equal(words("page"), "page");
  assert.equal(words("page.close.length"), "page.close.length");
});

test("one is said in another way than many, where the language does", () => {
  assert.equal(words("page.files", { count: 1 }), "1 file");
  assert.equal(words("page.files", { count: 0 }), "0 files");
  locale = "zh";
  assert.equal(words("page.files", { count: 1 }), "1 个文件");
});

test("a page that names no language reads English", () => {
  locale = undefined;
  assert.equal(language(), "en");
  assert.equal(words("page.close"), "Close");
});

test("a line of the server's is shown by its key, and as it is where that is not known", () => {
  const line = { key: "speed_alone", values: { now: "31 ms" }, text: "31 ms each" };
  assert.equal(lineText(line), "31 ms a step");
  assert.equal(lineText({ ...line, key: "new" }), "31 ms each");
  assert.equal(lineText({ text: "{braces} stay" }), "{braces} stay");
});

test("a result without lines is read line by line", () => {
  assert.deepEqual(linesOf({ text: "a\nb" }), [{ text: "a" }, { text: "b" }]);
  assert.deepEqual(linesOf({ lines: [{ key: "k", text: "t" }], text: "a" }), [
    { key: "k", text: "t" },
  ]);
});

test("sizes and times have the unit that people read them in", () => {
  assert.equal(bytes(0), "0 MiB");
  assert.equal(bytes(1.5 * 2 ** 20), "1.5 MiB");
  assert.equal(bytes(480.4 * 2 ** 20), "480 MiB");
  assert.equal(bytes(4 * 2 ** 30), "4 GiB");
  assert.equal(duration(7.25), "7.3 ms");
  assert.equal(duration(61.2), "61 ms");
  assert.equal(duration(2978), "2.98 s");
  assert.equal(duration(9), "9.0 ms"); // with the digits that the server's sentences have
  assert.equal(duration(7200), "7.20 s");
  assert.equal(number(1234), "1,234");
  locale = "de";
  assert.equal(number(1.25, 2), "1,25");
});

test("a whole report is said line by line in the page's language, or as the server says it", () => {
  const now = { key: "speed_alone", values: { now: "31 ms" }, text: "31 ms a step" };
  assert.equal(wholeText({ whole: [now, { text: "a note" }], text: "x" }), "31 ms a step\na note");
  assert.equal(wholeText({ text: "one\ntwo" }), "one\ntwo");
  assert.equal(wholeText({}), "");
});

test("a reason that stands in a line, or in another reason, is in the page's language, too", () => {
  const patches = { key: "patches", values: { name: "attn1" }, text: "another node patches attn1" };
  const unknown = { key: "new_one", values: {}, text: "a reason of another version" };
  const both = { key: "both", values: { one: patches, other: unknown }, text: "one; other" };
  const line = { key: "eager", values: { reason: "one; other" }, reasons: { reason: both } };
  const said = { ...line, text: "normal speed: one; other" };
  assert.equal(lineText(said), "normal speed: one; other");
  locale = "zh";
  assert.equal(lineText(said), "正常速度：其他节点修补了 attn1；a reason of another version");
  assert.equal(reasonText(patches), "其他节点修补了 attn1");
  assert.equal(reasonText("words alone"), "words alone");
  assert.equal(lineText({ ...line, reasons: undefined, text: "" }), "正常速度：one; other");
});
