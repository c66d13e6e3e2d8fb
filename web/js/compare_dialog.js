/** The pictures of two runs side by side, with what a step and the whole took in each. */
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { computedAlone, largestDifference, picturePairs, wholeMs } from "./compare_facts.js";
import { openDialog } from "./dialog.js";
import { el } from "./elements.js";
import { duration } from "./format.js";
import { lineText, words } from "./words.js";

/** @typedef {import("./compare_facts.js").Entry} Entry */

/** What a run with us, or without, had to do that the other had not. */
const ALONE = ["page.compare_with_did", "page.compare_without_did"];

/**
 * @param {Entry} first with us
 * @param {Entry} second without
 * @param {{steps: Record<string, any>[], notes: string[]}} compared the server's words on steps
 */
export async function showComparison(first, second, compared) {
  const rows = await Promise.all(picturePairs(first, second).map(row));
  const times = { now: duration(wholeMs(first)), eager: duration(wholeMs(second)) };
  const workflow = workflowName(first);
  const title = workflow ? words("page.compare_of", { workflow }) : words("page.compare");
  const body = [
    ...stepTexts(compared),
    el("div.compare", { role: "group", "aria-label": title, tabindex: 0 }, ...rows),
    el("p", words("page.compare_whole", times)),
    ...computedAlone(first, second).map((kinds, place) => {
      const nodes = kinds.map(titleOf).join(", ");
      return kinds.length && el("p.note", words(ALONE[place], { nodes }));
    }),
  ];
  openDialog(title, body).classList.add("warmgraph-wide");
}

/** What the workflow's tab is called, or the file that the run said it came from. */
function workflowName({ prompt: [, , , { extra_pnginfo: info }] }) {
  const { id, extra } = info?.workflow ?? {};
  const tabs = app.extensionManager?.workflow?.openWorkflows ?? [];
  const tab = tabs.find(({ activeState }) => id && activeState?.id === id);
  return tab?.filename ?? extra?.warmgraph?.path?.replace(/^workflows\/|\.json$/g, "");
}

/** @param {string} kind what people call a node of this class */
function titleOf(kind) {
  return /** @type {any} */ (window).LiteGraph?.registered_node_types[kind]?.title ?? kind;
}

function stepTexts({ steps, notes }) {
  const texts = steps.map(({ model, size, batch, said }) => {
    const images = batch > 1 ? `${batch} x ${size}` : size;
    return el("p.factor", `${model}, ${images}: ${lineText(said)}`);
  });
  return [...texts, ...notes.map((note) => el("p", words(`page.compare_${note}`)))];
}

async function row(pair) {
  const shown = pair.map(show);
  const names = ["with", "without"].map((side) => words(`page.compare_${side}`));
  const figures = shown.map((each, place) =>
    el("figure", { "aria-label": names[place] }, each, el("figcaption", names[place])),
  );
  const [key, values] = await differenceOf(shown);
  return el("div", ...figures, el("p", words(`page.compare_${key}`, values)));
}

function show(picture) {
  if (!picture) return el("img", { alt: "" });
  const { filename, subfolder = "", type = "output" } = picture;
  const src = api.apiURL(`/view?${new URLSearchParams({ filename, subfolder, type })}`);
  if (/\.(mp4|webm|mov|mkv)$/i.test(filename)) return el("video", { src, controls: true, loop: true });
  return el("img", { src, alt: "" });
}

/** How far apart two pictures are: the key of a text, and its values. */
async function differenceOf(pair) {
  if (pair.some(({ tagName }) => tagName !== "IMG")) return ["video"];
  const both = await Promise.all(pair.map(pixelsOf)).catch(() => undefined);
  if (!both) return ["gone"];
  const [one, other] = both;
  if (one.width !== other.width || one.height !== other.height) return ["sizes"];
  const value = largestDifference(one.data, other.data);
  return value ? ["difference", { value }] : ["same"];
}

async function pixelsOf(image) {
  await image.decode();
  const { naturalWidth: width, naturalHeight: height } = image;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, width, height);
}
