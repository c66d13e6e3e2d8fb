/** Where on the canvas a new node fits: it lies on nothing, and its two links stay short. */

/** @typedef {[number, number]} Point */
/** @typedef {[number, number, number, number]} Box left, top, width, height */

/** Between the new node and what is around it, in the canvas' pixels. */
const MARGIN = 20;
const STEP = 20;
/** How far from both ends one looks. */
const REACH = 1400;
/** Of a node's first slots, below its top edge. */
const SLOT = 14;
/** What a fault costs, in pixels of link. */
const THROUGH_A_NODE = 120;
const ACROSS_A_FRAME = 400;
/** A pixel of link to its consumer counts for more: the node belongs to that one. */
const NEAR_CONSUMER = 1.3;
const BACKWARDS = 4;

/**
 * @param {Box} a
 * @param {Box} b
 * @param {number} gap that there must be
 */
function meet(a, b, gap) {
  return (
    a[0] < b[0] + b[2] + gap &&
    b[0] < a[0] + a[2] + gap &&
    a[1] < b[1] + b[3] + gap &&
    b[1] < a[1] + a[3] + gap
  );
}

/** @param {Box} inner @param {Box} outer */
function within(inner, outer) {
  return (
    inner[0] >= outer[0] &&
    inner[1] >= outer[1] &&
    inner[0] + inner[2] <= outer[0] + outer[2] &&
    inner[1] + inner[3] <= outer[1] + outer[3]
  );
}

/** @param {Point} a @param {Point} b @param {Box} box whether the line between the points touches it */
function crosses(a, b, box) {
  let [first, last] = [0, 1];
  for (const axis of [0, 1]) {
    const way = b[axis] - a[axis];
    const ends = [box[axis] - a[axis], box[axis] + box[axis + 2] - a[axis]];
    if (way === 0) {
      if (ends[0] > 0 || ends[1] < 0) return false;
      continue;
    }
    const [enter, leave] = ends.map((end) => end / way).sort((x, y) => x - y);
    first = Math.max(first, enter);
    last = Math.min(last, leave);
  }
  return first <= last;
}

/** @param {Point} a @param {Point} b of a link, which leaves to the right and comes from the left */
function length(a, b) {
  const back = Math.max(0, a[0] + MARGIN - b[0]);
  return Math.hypot(b[0] - a[0], b[1] - a[1]) + BACKWARDS * back;
}

/**
 * @param {object} wanted
 * @param {Point} wanted.size of the new node, its title counted
 * @param {number} wanted.title height of that title
 * @param {Point} wanted.from where its input's link comes from
 * @param {Point} wanted.to where its output's link goes
 * @param {Box[]} wanted.taken what it must not lie on
 * @param {Box[]} wanted.frames what it should be in as a whole, or not at all
 * @returns {Point} its left upper corner, below the title
 */
export function freePlace({ size: [width, height], title, from, to, taken, frames }) {
  const left = Math.min(from[0], to[0] - width) - REACH / 2;
  const right = Math.max(from[0], to[0] - width) + REACH / 2;
  const top = Math.min(from[1], to[1]) - REACH;
  const bottom = Math.max(from[1], to[1]) + REACH;
  let best = { cost: Infinity, x: to[0], y: bottom };
  for (let y = to[1] - SLOT - STEP * Math.ceil((to[1] - top) / STEP); y < bottom; y += STEP)
    for (let x = to[0] - width - 2 * MARGIN - STEP * Math.ceil((to[0] - left) / STEP); x < right; x += STEP) {
      /** @type {Point} */
      const enters = [x, y + SLOT];
      /** @type {Point} */
      const leaves = [x + width, y + SLOT];
      let cost = length(from, enters) + NEAR_CONSUMER * length(leaves, to);
      if (cost >= best.cost) continue;
      /** @type {Box} */
      const box = [x, y - title, width, height];
      if (taken.some((other) => meet(box, other, MARGIN))) continue;
      for (const other of taken) {
        if (crosses(from, enters, inner(other))) cost += THROUGH_A_NODE;
        if (crosses(leaves, to, inner(other))) cost += THROUGH_A_NODE;
      }
      for (const frame of frames)
        if (meet(box, frame, MARGIN / 2) !== within(box, frame)) cost += ACROSS_A_FRAME;
      if (cost < best.cost) best = { cost, x, y };
    }
  return [best.x, best.y];
}

/** @param {Box} box less its edge, where links begin and end @returns {Box} */
function inner([x, y, width, height]) {
  return [x + 5, y + 5, width - 10, height - 10];
}
