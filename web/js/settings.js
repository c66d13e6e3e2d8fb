/**
 * Warmgraph's numbers under ComfyUI's Settings. The server owns them: the page shows the server's
 * values when it opens and sends what the user changes.
 */
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { openingReports } from "./reports.js";

/** The server refuses what is outside these ranges as well. */
const SETTINGS = [
  {
    key: "workers",
    id: "Warmgraph.Builder.Workers",
    category: ["Warmgraph", "Builder", "Workers"],
    name: "Builder processes (0 = automatic)",
    tooltip: "How many processes build graphs at the same time. Automatic looks at cores, RAM and VRAM.",
    defaultValue: 0,
    attrs: { min: 0, max: 64, step: 1 },
  },
  {
    key: "job_limit_s",
    id: "Warmgraph.Builder.JobLimit",
    category: ["Warmgraph", "Builder", "JobLimit"],
    name: "Time limit of one build (seconds)",
    tooltip: "A build that takes longer is given up; its part of the model runs as without Warmgraph.",
    defaultValue: 600,
    attrs: { min: 30, max: 86400, step: 30 },
  },
  {
    key: "idle_s",
    id: "Warmgraph.Builder.Idle",
    category: ["Warmgraph", "Builder", "Idle"],
    name: "Builder processes end when idle for (seconds)",
    tooltip: "Builder processes with nothing to do give their memory back after this time.",
    defaultValue: 30,
    attrs: { min: 1, max: 3600, step: 1 },
  },
  {
    key: "store_cap_gib",
    id: "Warmgraph.Store.Cap",
    category: ["Warmgraph", "Store", "Cap"],
    name: "Size limit of the shared graph store (GiB)",
    tooltip: "Above it the least recently used graphs go. Graphs beside a saved workflow are never removed.",
    defaultValue: 4,
    attrs: { min: 0.1, max: 1024, step: 0.5, minFractionDigits: 1, maxFractionDigits: 2 },
  },
  {
    key: "runs_before_special",
    id: "Warmgraph.Builder.RunsBeforeSpecial",
    category: ["Warmgraph", "Builder", "RunsBeforeSpecial"],
    name: "Runs of one size before it gets graphs of its own (0 = never)",
    tooltip: "Graphs for one size only are quicker. They are built beside the images, and those for all sizes stay beneath.",
    defaultValue: 3,
    attrs: { min: 0, max: 1000, step: 1 },
  },
  {
    key: "captured_vram_percent",
    id: "Warmgraph.Captured.Vram",
    category: ["Warmgraph", "Captured", "Vram"],
    name: "VRAM for captured steps (percent of the card, 0 = none)",
    tooltip: "Repeated steps are replayed from CUDA graphs. This much memory they may hold; ComfyUI gets it back when it needs room.",
    defaultValue: 10,
    attrs: { min: 0, max: 90, step: 1 },
  },
  {
    key: "keep_captured",
    id: "Warmgraph.Captured.Keep",
    category: ["Warmgraph", "Captured", "Keep"],
    name: "Keep captured steps between prompts (1 = yes, 0 = no)",
    tooltip: "0 gives their memory back when a prompt has sampled; each prompt then captures its steps anew.",
    defaultValue: 1,
    attrs: { min: 0, max: 1, step: 1 },
  },
];

/** The server's values, {} until they were read: before that nothing is sent. */
let current = {};

/** @param {Record<string, number>} values */
async function show(values) {
  current = values;
  for (const { id, key } of SETTINGS) {
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
  settings: SETTINGS.map(({ key, ...setting }) => ({
    ...setting,
    type: "number",
    onChange: (value) => send(key, value),
  })),
  async setup() {
    const { settings } = await openingReports();
    if (settings) await show(settings);
  },
});
