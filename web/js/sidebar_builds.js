/** What is being built, with buttons to pause and to cancel it. */
import { buttons, el, section } from "./elements.js";
import { buildsStand } from "./figures.js";
import { words } from "./words.js";

export function buildsSection({ building }, busy) {
  const parts = { going: running, paused: resting, none: () => [el("p", words("page.no_builds"))] };
  return section("builds", ...parts[buildsStand(building)](building, busy));
}

const resting = (_, busy) => [el("p", words("page.builds_paused")), choices(["resume"], busy)];

function running({ running: labels = [], paused, workers }, busy) {
  return [
    labels.length > 0 && el("ul.plain", ...labels.map((label) => el("li", label))),
    paused !== undefined && choices([paused ? "resume" : "pause", "cancel"], busy),
    workers > 0 && el("p", words("page.workers", { count: workers })),
  ];
}

function choices(actions, busy) {
  const named = actions.map((name) => [name, words(`page.${name}`)]);
  return buttons(named, (name) => ({ disabled: busy.has(name) }));
}
