/** Run the last prompt once more without us, with the same seeds, and show what came of both. */
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { post, toast } from "./asking.js";
import { showComparison } from "./compare_dialog.js";
import { picturesOf } from "./compare_facts.js";
import { isOurs } from "./graph_places.js";
import "./locale.js";
import { words } from "./words.js";

/** Prompts of the host's history that are looked at. */
const LOOKED_AT = 50;
/** Between two looks at whether a prompt is done, in milliseconds. */
const PAUSE = 1000;

/** It ends before there is something to show; its text says why, if that is not shown already. */
class Ended extends Error {}

const ended = (key, values) => new Ended(words(`page.compare_${key}`, values));

let underWay = false;

export async function compare() {
  if (underWay) return;
  underWay = true;
  try {
    const first = await lastPrompt();
    const second = await finished(await queued(first));
    const [one, other] = [first, second].map(({ prompt: [, id] }) => id);
    const compared = await post("/warmgraph/compared", { first: one, second: other });
    if (compared) await showComparison(first, second, compared);
  } catch (error) {
    if (!(error instanceof Ended)) throw error;
    if (error.message) toast("warn", words("page.compare"), error.message, 12000);
  } finally {
    underWay = false;
  }
}

async function get(route) {
  const response = await api.fetchApi(route).catch(() => undefined);
  if (!response?.ok) throw new Ended(words("page.no_answer"));
  return response.json();
}

/** This page's newest prompt with a model of ours, as the host's history has it. */
async function lastPrompt() {
  const isOne = ({ prompt: [, , nodes, { client_id: page, warmgraph }] }) =>
    page === api.clientId &&
    !warmgraph?.plain &&
    Object.values(nodes).some((node) => isOurs({ comfyClass: node.class_type }));
  const last = Object.values(await get(`/history?max_items=${LOOKED_AT}`))
    .filter(isOne)
    .pop();
  if (!last) throw ended("nothing");
  if (last.status?.status_str !== "success") throw ended("unfinished");
  if (!Object.values(last.outputs).flatMap(picturesOf).length) throw ended("no_picture");
  return last;
}

/** Queue the same without us; returns the prompt's id. */
async function queued({ prompt: [, , prompt, { extra_pnginfo: info }, outputs] }) {
  const plain = await post("/warmgraph/plain", { prompt, outputs });
  if (!plain) throw new Ended();
  const answer = await post("/prompt", {
    prompt: plain.prompt,
    partial_execution_targets: plain.outputs,
    client_id: api.clientId,
    extra_data: { warmgraph: { plain: true }, ...(info && { extra_pnginfo: info }) },
  });
  if (!answer) throw new Ended();
  toast("success", words("page.compare"), words("page.compare_running"), 6000);
  return answer.prompt_id;
}

/** Wait for a prompt's end. @param {string} id */
async function finished(id) {
  for (let isQueued = true; ;) {
    const { [id]: entry } = await get(`/history/${id}`);
    if (entry?.status.status_str === "success") return entry;
    const failure = entry?.status.messages.find(([event]) => event === "execution_error");
    if (failure) throw ended("failed", { why: failure[1].exception_message });
    if (entry || !isQueued) throw ended("cancelled");
    await new Promise((done) => setTimeout(done, PAUSE));
    const queue = Object.values(await get("/queue")).flat();
    isQueued = queue.some((each) => each[1] === id);
  }
}

app.registerExtension({
  name: "Warmgraph.Compare.Command",
  commands: [{ id: "Warmgraph.Compare", label: () => words("page.compare_command"), function: compare }],
  getNodeMenuItems(node) {
    if (!isOurs(node)) return [];
    return [{ content: words("page.compare_command"), callback: () => void compare() }];
  },
});
