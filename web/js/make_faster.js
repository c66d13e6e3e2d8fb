/**
 * The commands that make a workflow faster, and that take Warmgraph out of it. Where Compile Model
 * belongs is the server's to say: it is asked with the prompt that the page would send.
 */
import { app } from "../../../scripts/app.js";
import { post, toast } from "./asking.js";
import { linkInto, linksFrom, showToast } from "./frontend.js";
import { BYPASSED, inOneStep, insert, MUTED, ON, takeOut } from "./graph_edit.js";
import { allNodes, goTo, isOurs, nameOf, nodeAt } from "./graph_places.js";
import { newestSnapshot } from "./reports.js";
import { ALSO, FOR_ALL } from "./setting_ids.js";
import { lineText, words } from "./words.js";

/** Compile nodes, by what they compile. */
export const KINDS = {
  model: "WarmgraphCompileModel",
  vae: "WarmgraphCompileVAE",
  control_net: "WarmgraphCompileControlNet",
};
/** Nodes by what the server is asked for. */
const NODES = { ...KINDS, step_cache: "WarmgraphStepCache" };
const ALL = Object.keys(KINDS);

/** Milliseconds that toasts stay. */
const LIFE = 12000;
/** Whether it was asked, in this browser, what else is to be compiled. */
const ASKED = "warmgraph.asked";

/**
 * The links before the inputs that the server named, together that come from the same place. A
 * subgraph that is used several times has each of them once.
 */
function spotsOf(places) {
  const spots = new Map();
  for (const { node: place, input, kind } of places) {
    const node = nodeAt(place);
    const link = linkInto(
      node,
      node?.inputs?.find(({ name }) => name === input),
    );
    if (!link) continue;
    const key = [node.graph.id, link.origin_id, link.origin_slot].join(" ");
    const spot = spots.get(key) ?? { graph: node.graph, kind, links: new Map() };
    spot.links.set(`${link.target_id} ${link.target_slot}`, link);
    spots.set(key, spot);
  }
  return [...spots.values()].map((spot) => ({ ...spot, links: [...spot.links.values()] }));
}

/** A node of ours that is bypassed in this link, perhaps behind others that are, too. */
function asleep({ graph, kind, links: [link] }) {
  let node = graph.getNodeById(link.origin_id);
  while (node?.mode === BYPASSED && node.comfyClass !== NODES[kind]) {
    const { type } = node.outputs[link.origin_slot];
    link = linkInto(
      node,
      node.inputs?.find((input) => input.type === type),
    );
    node = graph.getNodeById(link?.origin_id);
  }
  return node?.mode === BYPASSED ? node : undefined;
}

function whereOf(nodes) {
  const names = nodes.map(({ graph }) => nameOf(graph) ?? words("page.this_workflow"));
  return [...new Set(names)].join(", ");
}

const isOn = (setting) => app.extensionManager?.setting?.get(setting) === true;

/** What to do after nodes were added, or why that changes nothing. */
function nextText() {
  const stops = newestSnapshot().warnings?.find(({ id }) => /^(missing |no builds)/.test(id));
  if (stops) return stops.lines.map(lineText).join(": ");
  return words(isOn(FOR_ALL) ? "page.press_run_for_all" : "page.press_run");
}

/** Say which nodes were added, and which were there but off, and offer to go there. */
export function tellOf(added, awake = [], detail = nextText()) {
  const said = (key, nodes) => nodes.length && words(key, { count: nodes.length, where: whereOf(nodes) });
  const parts = [said("page.added", added), said("page.switched_on", awake)].filter(Boolean);
  const message = { severity: "success", summary: `Warmgraph: ${parts.join("; ")}`, detail, life: LIFE };
  showToast(message, words("page.show"), () => goTo([...added, ...awake][0]));
}

let underWay = false; // a key that is held asks again and again

/** Ask the server where nodes of these kinds belong, and do something about it. */
async function withPlaces(kinds, act) {
  if (underWay) return;
  underWay = true;
  try {
    const workflow = app.rootGraph.id;
    const { output: prompt } = await app.graphToPrompt();
    const answer = await post("/warmgraph/places", { prompt, kinds });
    if (answer && app.rootGraph.id === workflow) act(answer);
  } finally {
    underWay = false;
  }
}

/** @param {boolean} [all] whether VAEs and ControlNets are compiled, too; the setting says by default */
export async function makeFaster(all = isOn(ALSO)) {
  await withPlaces(ALL, ({ places, left }) => {
    const kinds = all ? ALL : ["model"];
    const isIn = ({ kind }) => kinds.includes(kind);
    place({ places: places.filter(isIn), left: left.filter(isIn) }, kinds);
    if (!places.every(isIn)) askOnce();
  });
}

/** Offer to compile the rest, now and later. */
function askOnce() {
  if (localStorage.getItem(ASKED)) return;
  localStorage.setItem(ASKED, "1");
  const [summary, detail, label] = ["also", "also_detail", "also_do"].map((key) => words(`page.${key}`));
  showToast({ severity: "info", summary, detail, life: 2 * LIFE }, label, () => {
    app.extensionManager?.setting?.set(ALSO, true);
    void makeFaster(true);
  });
}

/** Before each sampler of ten steps and more. It costs quality, so nothing but its command adds it. */
export async function addStepCache() {
  await withPlaces(["step_cache"], (answer) => place(answer, ["step_cache"], words("page.step_cache_cost")));
}

/** Whether a muted node of ours is all that is off between a model and its sampler. */
function isWanted(node) {
  const links = (node.outputs ?? []).flatMap((output) => linksFrom(node, output));
  const targets = links.map(({ target_id: id }) => node.graph.getNodeById(id));
  return targets.some((node) => node?.mode !== MUTED); // a subgraph's output is none
}

function place({ places, left }, kinds, detail) {
  // Nothing gets through a muted one: such a prompt has no model to ask about.
  const wanted = kinds.map((kind) => NODES[kind]);
  const muted = allNodes().filter(({ mode, comfyClass }) => mode === MUTED && wanted.includes(comfyClass));
  const spots = spotsOf(places).map((spot) => ({ ...spot, node: asleep(spot) }));
  const awake = [...muted.filter(isWanted), ...spots.flatMap(({ node }) => node ?? [])];
  const free = spots.filter(({ node }) => !node);
  if (!free.length && !awake.length) return tellNothing(left);
  const added = inOneStep(() => {
    for (const node of awake) node.mode = ON;
    return free.map(({ graph, kind, links }) => insert(graph, NODES[kind], links));
  });
  tellOf(added, awake, detail);
}

/** Say why nothing was added, and offer to go to a node that is there already. */
function tellNothing(left) {
  const ours = left.flatMap(({ line: { key, values } }) =>
    key === "left_alone_ours" ? (nodeAt(values.id) ?? []) : [],
  );
  const why = [...new Set(left.map(({ line }) => leftText(line)))].slice(0, 2);
  const summary = `Warmgraph: ${words("page.nothing_added")}`;
  const detail = why.join("\n") || words("page.no_sampler");
  const message = { severity: "info", summary, detail, life: LIFE };
  if (!ours.length) return showToast(message);
  showToast(message, words("page.show"), () => goTo(ours[0]));
}

/** Why a model was left alone; a node of ours by its title and where it is. */
function leftText(line) {
  const node = line.key === "left_alone_ours" && nodeAt(line.values.id);
  if (!node) return lineText(line);
  return words("page.there_already", { title: node.getTitle(), where: whereOf([node]) });
}

export function removeOurs() {
  const ours = allNodes().filter(isOurs);
  const values = { count: ours.length, where: whereOf(ours) };
  if (ours.length) inOneStep(() => ours.forEach(takeOut));
  const [severity, said] = ours.length ? ["success", "removed"] : ["info", "nothing_removed"];
  toast(severity, `Warmgraph: ${words(`page.${said}`, values)}`, undefined, LIFE);
}
