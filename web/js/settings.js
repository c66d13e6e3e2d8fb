/**
 * Warmgraph's controls under ComfyUI's Settings. The server owns them, words included: the page asks
 * it for its table when it opens, and sends what the user changes.
 */
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { post } from "./asking.js";

/** What the page's own controls are called. */
const CONTROLS = { number: "number", slider: "slider", toggle: "boolean" };

/**
 * @typedef {{
 *   place: string, group: string, title: string, help: string, unit: string, control: string, step: number,
 *   whole: boolean, value: number, default: number, minimum: number, maximum: number,
 * }} Setting
 * @returns {Promise<Record<string, Setting>>} {} when the server does not answer
 */
async function fetchSettings() {
  const response = await api.fetchApi("/warmgraph/settings").catch(() => undefined);
  return response?.ok ? await response.json() : {};
}

/** What the server had when the page opened; settings must be whole when they are registered. */
const opened = await fetchSettings();

function idOf(setting) {
  return `Warmgraph.${setting.place}`;
}

/**
 * The host has one table for the names of all packs' groups: ours are "Warmgraph.Speed" and the like,
 * which locales call by shorter names. A setting's id is its place, whatever group it is in.
 */
function categoryOf({ place, group }) {
  return ["Warmgraph", `Warmgraph.${group}`, place.split(".")[1]];
}

/** Groups as they come, last first: the host shows those with the largest order first. */
const GROUPS = ["Experts", "Disk", "Speed"];

/** @param {number} number of it in the server's table, which is in the order to be shown */
function orderOf({ group }, number) {
  return 100 * (1 + GROUPS.indexOf(group)) - number;
}

function attrsOf({ minimum, maximum, step, whole }) {
  const digits = whole ? {} : { minFractionDigits: 1, maxFractionDigits: 2 };
  return { min: minimum, max: maximum, step, ...digits };
}

/**
 * The server's values, and those that it is sent; {} until the page shows them: before that nothing is
 * sent.
 */
let current = {};

/** What is sent: one change after the other, or an older one could come last. */
let sent = Promise.resolve(/** @type {any} */ (undefined));

async function show(values) {
  current = values;
  for (const [key, value] of Object.entries(values)) {
    const setting = app.extensionManager?.setting;
    const id = opened[key] && idOf(opened[key]);
    if (id && setting?.get(id) !== value) await setting?.set(id, value);
  }
}

async function send(key, value) {
  if (!(key in current) || current[key] === value) return;
  const before = current[key];
  current = { ...current, [key]: value }; // it may be changed back before the server has answered
  sent = sent.then(() => post("/warmgraph/settings", { [key]: value }));
  if (!(await sent) && current[key] === value) await show({ ...current, [key]: before });
}

app.registerExtension({
  name: "Warmgraph.Settings.Numbers",
  settings: Object.entries(opened).map(([key, setting], number) => ({
    id: idOf(setting),
    category: categoryOf(setting),
    sortOrder: orderOf(setting, number),
    name: setting.unit ? `${setting.title} (${setting.unit})` : setting.title,
    tooltip: setting.help,
    type: CONTROLS[setting.control],
    defaultValue: setting.default,
    ...(setting.control === "toggle" ? {} : { attrs: attrsOf(setting) }),
    onChange: (value) => send(key, value),
  })),
  async setup() {
    const values = Object.entries(opened).map(([key, { value }]) => [key, value]);
    if (values.length) await show(Object.fromEntries(values));
  },
});
