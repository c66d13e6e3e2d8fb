/** What two prompts of the host's history, with and without us, say: plain data. */

const SHOWN = /\.(png|jpe?g|webp|avif|gif|mp4|webm|mov|mkv)$/i;

/**
 * @typedef {Record<string, any>} Entry of the host's /history
 * @typedef {{filename: string, subfolder?: string, type?: string}} Picture or video
 */

/** How long a finished prompt took, in milliseconds. @param {Entry} entry */
export function wholeMs({ status: { messages } }) {
  const [begin, end] = ["execution_start", "execution_success"].map(
    (name) => messages.find(([event]) => event === name)[1].timestamp,
  );
  return end - begin;
}

/** What a node of the prompt with us is called in the one without, where it is another one there. */
const standIn = (id) => `${id}-plain`;

/**
 * Classes of nodes that only one of two runs computed: the other had their results already.
 * @returns {string[][]} each once, of either
 */
export function computedAlone(first, second) {
  const [one, other] = [first, second].map(({ prompt: [, , nodes], status: { messages } }) => {
    const kept = messages.find(([event]) => event === "execution_cached")?.[1].nodes ?? [];
    return (id) => !kept.includes(nodes[standIn(id)] ? standIn(id) : id);
  });
  const nodes = Object.entries(first.prompt[2]).map(([id, node]) => [id, node.class_type]);
  const theirs = nodes.filter(([, kind]) => !kind.startsWith("Warmgraph"));
  const kinds = (mine, others) => [
    ...new Set(theirs.filter(([id]) => mine(id) && !others(id)).map(([, kind]) => kind)),
  ];
  return [kinds(one, other), kinds(other, one)];
}

/**
 * @param {Entry} second where a node that is another one has an id of its own
 * @returns {[Picture, Picture | undefined][]}
 */
export function picturePairs(first, second) {
  return Object.entries(first.outputs).flatMap(([id, output]) => {
    const others = picturesOf(second.outputs[standIn(id)] ?? second.outputs[id]);
    return picturesOf(output).map((each, place) => [each, others[place]]);
  });
}

/** @param {Record<string, any>} [output] of a node @returns {Picture[]} */
export function picturesOf(output = {}) {
  return Object.values(output)
    .flat()
    .filter((each) => SHOWN.test(each?.filename));
}

/**
 * @param {Uint8ClampedArray} one
 * @param {Uint8ClampedArray} other of the same length
 */
export function largestDifference(one, other) {
  return one.reduce((most, value, place) => Math.max(most, Math.abs(value - other[place])), 0);
}
