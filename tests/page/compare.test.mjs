import assert from "node:assert/strict";
import { test } from "node:test";

import {
  computedAlone, largestDifference, picturePairs, wholeMs,
} from "../../web/js/compare_facts.js"; // prettier-ignore

const A = { filename: "a.png", subfolder: "", type: "output" };
const B = { filename: "b.png", subfolder: "", type: "temp" };
const CLIP = { filename: "c.mp4", subfolder: "video", type: "output" };

test("pictures stand in pairs by the node that made them, which may have another name", () => {
  const first = { outputs: { 7: { images: [A], warmgraph: [{ id: "x" }] }, 9: { images: [CLIP] } } };
  const second = { outputs: { "7-plain": { images: [B] }, 9: { gifs: [CLIP] } } };
  assert.deepEqual(picturePairs(first, second), [[A, B], [CLIP, CLIP]]);
  assert.deepEqual(picturePairs(first, { outputs: {} }), [[A, undefined], [CLIP, undefined]]);
});

test("what is neither a picture nor a video is none", () => {
  const outputs = { 1: { audio: [{ filename: "a.flac" }], text: ["png"], animated: [false] } };
  assert.deepEqual(picturePairs({ outputs }, { outputs }), []);
});

test("the whole of a prompt is from its begin to its end", () => {
  const messages = [
    ["execution_start", { timestamp: 1000 }],
    ["execution_cached", { timestamp: 1001, nodes: [] }],
    ["execution_success", { timestamp: 3500 }],
  ];
  assert.equal(wholeMs({ status: { messages } }), 2500);
});

test("the largest difference is that of one value, whichever is larger", () => {
  const bytes = (...values) => Uint8ClampedArray.from(values);
  assert.equal(largestDifference(bytes(1, 2, 3), bytes(1, 2, 3)), 0);
  assert.equal(largestDifference(bytes(10, 250, 3), bytes(13, 240, 3)), 10);
  assert.equal(largestDifference(bytes(0, 255), bytes(255, 255)), 255);
});

test("what only one of two runs had to do is named, by classes and without our own", () => {
  const entry = (ids, kept) => ({
    prompt: [0, "id", Object.fromEntries(Object.entries(ids).map(([id, kind]) => [id, { class_type: kind }]))],
    status: { messages: [["execution_cached", { nodes: kept }]] },
  });
  const nodes = { 1: "Loader", 2: "WarmgraphCompileModel", 3: "KSampler", 4: "SaveImage" };
  const beside = { ...nodes, "2-plain": "WarmgraphCompileModel", "4-plain": "PreviewImage" };
  const alone = (kept, keptBeside) => computedAlone(entry(nodes, kept), entry(beside, keptBeside));
  assert.deepEqual(alone([], ["1", "2"]), [["Loader"], []]);
  assert.deepEqual(alone(["1", "2", "3", "4"], ["1", "2"]), [[], ["KSampler", "SaveImage"]]);
  assert.deepEqual(alone(["1", "2"], ["1", "2"]), [[], []]);
});
