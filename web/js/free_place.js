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
/** What half a node in a group costs, in pixels of link. */
const ACROSS_A_FRAME = 400;
/** A pixel of link to its consumer counts for more: the node belongs to that one. */
const NEAR_CONSUMER = 1.3;
const BACKWARDS = 4;

/** Whether boxes are nearer to each other than a gap. */
function meet(a, b, gap) {
  const near = (axis) => a[axis] < b[axis] + b[axis + 2] + gap && b[axis] < a[axis] + a[axis + 2] + gap;
  return near(0) && near(1);
}

function within(a, b) {
  const inside = (axis) => a[axis] >= b[axis] && a[axis] + a[axis + 2] <= b[axis] + b[axis + 2];
  return inside(0) && inside(1);
}

/** Of a link, which leaves to the right and comes in from the left. */
function length(a, b) {
  const back = Math.max(0, a[0] + MARGIN - b[0]);
  return Math.hypot(b[0] - a[0], b[1] - a[1]) + BACKWARDS * back;
}

/** 0, 1, -1, 2 and so on: what is near is found soon, and rules out what is far. */
function outward(reach) {
  return Array.from({ length: 2 * reach + 1 }, (_, place) => (place % 2 ? (place + 1) / 2 : -place / 2));
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
  const start = [to[0] - width - 2 * MARGIN, to[1] - SLOT];
  const columns = Math.ceil((Math.abs(to[0] - from[0]) + REACH) / STEP);
  const rows = Math.ceil((Math.abs(to[1] - from[1]) + REACH) / STEP);
  let best = { cost: Infinity, place: start };
  for (const row of outward(rows))
    for (const column of outward(columns)) {
      const [x, y] = [start[0] + column * STEP, start[1] + row * STEP];
      const slots = y + SLOT;
      let cost = length(from, [x, slots]) + NEAR_CONSUMER * length([x + width, slots], to);
      const box = [x, y - title, width, height];
      if (cost >= best.cost || taken.some((other) => meet(box, other, MARGIN))) continue;
      for (const frame of frames)
        if (meet(box, frame, MARGIN / 2) !== within(box, frame)) cost += ACROSS_A_FRAME;
      if (cost < best.cost) best = { cost, place: [x, y] };
    }
  return /** @type {Point} */ (best.place);
}
