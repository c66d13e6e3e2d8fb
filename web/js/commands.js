/** Warmgraph's commands, where the host offers commands: its menus, its keys, and the canvas. */
import { app } from "../../../scripts/app.js";
import { linkEntries, nodeEntries } from "./compile_here.js";
import { allNodes, isOurs } from "./graph_places.js";
import "./locale.js";
import { addStepCache, makeFaster, removeOurs } from "./make_faster.js";
import { words } from "./words.js";

const MAKE_FASTER = "Warmgraph.MakeFaster";

const command = (id, key, icon, act) => ({ id, icon: `pi ${icon}`, label: () => words(key), function: act });

const COMMANDS = [
  command(MAKE_FASTER, "page.make_faster", "pi-gauge", () => makeFaster()),
  command("Warmgraph.MakeFasterVAE", "page.make_faster_vae", "pi-gauge", () => makeFaster(true)),
  command("Warmgraph.AddStepCache", "page.add_step_cache", "pi-forward", addStepCache),
  command("Warmgraph.Remove", "page.remove", "pi-times", removeOurs),
];

const entryOf = ({ label, function: act }) => ({ content: label(), callback: () => void act() });

/** Alt+W; on a Mac that key gives another letter. */
const KEYS = ["w", "∑"];

app.registerExtension({
  name: "Warmgraph.Workflow.Commands",
  commands: COMMANDS,
  menuCommands: [{ path: ["Warmgraph"], commands: COMMANDS.map(({ id }) => id) }],
  keybindings: KEYS.map((key) => ({ commandId: MAKE_FASTER, combo: { key, alt: true } })),
  getCanvasMenuItems(canvas) {
    const [make, , , remove] = COMMANDS;
    const removing = allNodes().some(isOurs) ? [entryOf(remove)] : [];
    return [null, ...linkEntries(canvas), entryOf(make), ...removing];
  },
  getNodeMenuItems(node) {
    const here = nodeEntries(node);
    return here.length || node.subgraph ? [null, ...here, entryOf(COMMANDS[0])] : [];
  },
});
