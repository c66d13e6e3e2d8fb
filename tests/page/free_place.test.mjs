import assert from "node:assert/strict";
import { test } from "node:test";

import { freePlace } from "../../web/js/free_place.js";

const WANTED = { size: [300, 244], title: 30, from: [0, 100], to: [600, 100], taken: [], frames: [] };

/** The box that it asked to be free. */
const boxAt = ([x, y]) => [x, y - 30, 300, 244];

function meet(a, b) {
  const apart = (axis) => a[axis] + a[axis + 2] <= b[axis] || b[axis] + b[axis + 2] <= a[axis];
  return !apart(0) && !apart(1);
}

test("in the open it stands straight between both ends, near what it is for", () => {
  const [x, y] = freePlace(WANTED);
  assert.equal(y + 14, 100, "its first slots lie on the line between both");
  assert.ok(x > 0 && x + 300 < 600);
  assert.ok(600 - (x + 300) <= 60, "no further from its consumer than links need");
});

test("it lies on nothing, however crowded it is", () => {
  const taken = [];
  for (let x = -800; x < 1400; x += 240) for (let y = -300; y < 500; y += 170) taken.push([x, y, 230, 150]);
  const box = boxAt(freePlace({ ...WANTED, taken }));
  assert.deepEqual(taken.filter((other) => meet(box, other)), []);
});

test("it is in a group as a whole or not at all", () => {
  for (const frames of [[[200, 0, 500, 150]], [[100, -100, 600, 500]]]) {
    const box = boxAt(freePlace({ ...WANTED, frames }));
    const [frame] = frames;
    const isIn = box[0] >= frame[0] && box[1] >= frame[1]
      && box[0] + 300 <= frame[0] + frame[2] && box[1] + 244 <= frame[1] + frame[3]; // prettier-ignore
    assert.ok(isIn || !meet(box, frame), String(box));
  }
});

test("its links go forwards where there is room for that", () => {
  const taken = [[100, 60, 480, 80]];
  const [x] = freePlace({ ...WANTED, taken });
  assert.ok(x >= 0 && x + 300 <= 600);
});
