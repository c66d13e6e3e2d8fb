/**
 * Warmgraph's numbers under ComfyUI's Settings. The server owns them: the page asks it for values,
 * defaults and ranges when it opens, and sends what the user changes.
 */
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";

/** In what words the page asks for each; defaults and ranges are the server's. */
const WORDS = [
  {
    key: "workers",
    id: "Warmgraph.Builder.Workers",
    category: ["Warmgraph", "Builder", "Workers"],
    name: "Builder processes (0 = automatic)",
    tooltip: "How many processes build graphs at the same time. Automatic looks at cores, RAM and VRAM.",
    attrs: { step: 1 },
  },
  {
    key: "job_limit_s",
    id: "Warmgraph.Builder.JobLimit",
    category: ["Warmgraph", "Builder", "JobLimit"],
    name: "Time limit of one build (seconds)",
    tooltip: "A build that takes longer is given up; its part of the model runs as without Warmgraph.",
    attrs: { step: 30 },
  },
  {
    key: "idle_s",
    id: "Warmgraph.Builder.Idle",
    category: ["Warmgraph", "Builder", "Idle"],
    name: "Builder processes end when idle for (seconds)",
    tooltip: "Builder processes with nothing to do give their memory back after this time.",
    attrs: { step: 1 },
  },
  {
    key: "store_cap_gib",
    id: "Warmgraph.Store.Cap",
    category: ["Warmgraph", "Store", "Cap"],
    name: "Size limit of the shared graph store (GiB)",
    tooltip: "Above it the least recently used graphs go. Graphs beside a saved workflow are never removed.",
    attrs: { step: 0.5, minFractionDigits: 1, maxFractionDigits: 2 },
  },
  {
    key: "runs_before_special",
    id: "Warmgraph.Builder.RunsBeforeSpecial",
    category: ["Warmgraph", "Builder", "RunsBeforeSpecial"],
    name: "Runs of one size before it gets graphs of its own (0 = never)",
    tooltip: "Graphs for one size only are quicker. They are built beside the images, and those for all sizes stay beneath.",
    attrs: { step: 1 },
  },
  {
    key: "captured_vram_percent",
    id: "Warmgraph.Captured.Vram",
    category: ["Warmgraph", "Captured", "Vram"],
    name: "VRAM for captured steps (percent of the card, 0 = none)",
    tooltip: "Repeated steps are replayed from CUDA graphs. This much memory they may hold; ComfyUI gets it back when it needs room.",
    attrs: { step: 1 },
  },
  {
    key: "captured_limit_s",
    id: "Warmgraph.Captured.Limit",
    category: ["Warmgraph", "Captured", "Limit"],
    name: "Longest step that is captured (seconds)",
    tooltip: "A step that takes longer does not wait for the processor, so replaying it would save nothing.",
    attrs: { step: 0.1, minFractionDigits: 1, maxFractionDigits: 2 },
  },
  {
    key: "keep_captured",
    id: "Warmgraph.Captured.Keep",
    category: ["Warmgraph", "Captured", "Keep"],
    name: "Keep captured steps between prompts (1 = yes, 0 = no)",
    tooltip: "0 gives their memory back when a prompt has sampled; each prompt then captures its steps anew.",
    attrs: { step: 1 },
  },
];

/**
 * @typedef {{value: number, default: number, minimum: number, maximum: number}} Setting
 * @returns {Promise<Record<string, Setting>>} {} when the server does not answer
 */
async function fetchSettings() {
  const response = await api.fetchApi("/warmgraph/settings").catch(() => undefined);
  return response?.ok ? await response.json() : {};
}

/** What the server had when the page opened; settings must be whole when they are registered. */
const opened = await fetchSettings();

/** The server's values, {} until the page shows them: before that nothing is sent. */
let current = {};

/** @param {Record<string, number>} values */
async function show(values) {
  current = values;
  for (const { id, key } of WORDS) {
    const setting = app.extensionManager?.setting;
    if (key in values && setting?.get(id) !== values[key]) await setting?.set(id, values[key]);
  }
}

/**
 * @param {string} key
 * @param {number} value
 */
async function send(key, value) {
  if (!(key in current) || current[key] === value) return;
  const response = await api.fetchApi("/warmgraph/settings", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ [key]: value }),
  });
  const answer = await response.json();
  if (response.ok) {
    current = answer;
    return;
  }
  app.extensionManager?.toast?.add({
    severity: "error",
    summary: "Warmgraph",
    detail: answer.error,
    life: 8000,
  });
  await show(current);
}

app.registerExtension({
  name: "Warmgraph.Settings.Numbers",
  settings: WORDS.filter(({ key }) => key in opened).map(({ key, attrs, ...words }) => ({
    ...words,
    type: "number",
    defaultValue: opened[key].default,
    attrs: { min: opened[key].minimum, max: opened[key].maximum, ...attrs },
    onChange: (value) => send(key, value),
  })),
  async setup() {
    const values = Object.entries(opened).map(([key, { value }]) => [key, value]);
    if (values.length) await show(Object.fromEntries(values));
  },
});
