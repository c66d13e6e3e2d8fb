import assert from "node:assert/strict";
import { test } from "node:test";

import {
  barsOf, buildsStand, csvOf, dotsOf, seriesOf,
} from "../../web/js/figures.js";
import { percent } from "../../web/js/format.js";

const RUN = {
  at: 1764000000, model: "SDXL", size: "1024x1024", batch: 1, steps: 20, form: "compiled",
  ms: 31.25, eager_ms: 61, builds: 0, misses: 0,
}; // prettier-ignore

test("bars stand in the order of speed and are as long as their times beside the longest", () => {
  const speed = { form: "compiled", ms: { compiled: 30, eager: 60, exact: 45 } };
  assert.deepEqual(barsOf(speed), [
    { form: "eager", ms: 60, share: 100, current: false },
    { form: "exact", ms: 45, share: 75, current: false },
    { form: "compiled", ms: 30, share: 50, current: true },
  ]);
});

test("only what was measured has a bar", () => {
  assert.deepEqual(barsOf(null), []);
  assert.deepEqual(barsOf({ form: "exact", ms: {} }), []);
  const bars = barsOf({ form: "exact", ms: { exact: 40 } });
  assert.deepEqual(bars.map(({ form, share }) => [form, share]), [["exact", 100]]);
});

test("a pause is told whether builds wait for its end or not", () => {
  assert.equal(buildsStand({ done: 2, total: 8, paused: true }), "going");
  assert.equal(buildsStand({ done: 8, total: 8, paused: true }), "paused");
  assert.equal(buildsStand({ done: 8, total: 8, paused: false }), "none");
  assert.equal(buildsStand(undefined), "none");
});

test("a plot holds the newest run's like alone: same model, size and batch, with a time", () => {
  const other = { ...RUN, model: "SD1.5" };
  const untimed = { ...RUN, ms: null };
  const batch = { ...RUN, batch: 2 };
  const newest = { ...RUN, ms: 30 };
  assert.deepEqual(seriesOf([RUN, other, batch, newest, untimed]), [RUN, newest]);
  assert.deepEqual(seriesOf([untimed]), []);
  assert.deepEqual(seriesOf([]), []);
});

test("dots go from left to right, longer times higher, eager's line with them", () => {
  const series = [{ ...RUN, ms: 60, eager_ms: null }, { ...RUN, ms: 40 }, { ...RUN, ms: 30, eager_ms: 60 }];
  const { dots, top, eager } = dotsOf(series, 280, 60);
  assert.equal(top, 61);
  assert.deepEqual(dots.map(({ x }) => x), [0, 140, 280]);
  assert.ok(dots[0].y < dots[1].y && dots[1].y < dots[2].y && dots[2].y < 60);
  assert.equal(eager, 60 - (60 * 60) / 61);
  const [alone] = dotsOf([{ ...RUN, eager_ms: null }], 280, 60).dots;
  assert.deepEqual([alone.x, alone.y], [140, 0]);
});

test("a table has a line for each run, times in ISO 8601, unknown ones empty", () => {
  assert.equal(
    csvOf([RUN, { ...RUN, eager_ms: null, form: "exact", builds: 3 }]),
    "at,model,size,batch,steps,form,ms,eager_ms,builds,misses\r\n" +
      "2025-11-24T16:00:00.000Z,SDXL,1024x1024,1,20,compiled,31.25,61,0,0\r\n" +
      "2025-11-24T16:00:00.000Z,SDXL,1024x1024,1,20,exact,31.25,,3,0\r\n",
  );
  assert.equal(csvOf([]).split("\r\n").length, 2);
});

test("names with commas, quotes and line ends stay one cell, and no name is a formula", () => {
  const cellOf = (model) => csvOf([{ ...RUN, model }]).split("\r\n")[1].split("Z,")[1];
  assert.ok(cellOf('my, "best"').startsWith('"my, ""best""",1024'));
  assert.ok(csvOf([{ ...RUN, model: "a\nb" }]).includes('"a\nb",1024'));
  for (const start of ["=", "+", "-", "@"])
    assert.ok(cellOf(`${start}1+1`).startsWith(`'${start}1+1,1024`));
  assert.ok(csvOf([{ ...RUN, ms: -1 }]).includes(",-1,"), "numbers are no formulas");
});

test("shares stay between 0 and 100, and of nothing there is none", () => {
  assert.deepEqual([percent(3, 12), percent(5, 4), percent(-1, 4), percent(0, 0)], [25, 100, 0, 0]);
});
