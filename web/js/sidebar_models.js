/** The models of this session: how far each is, how quick, and what of it is not compiled. */
import { button, el, section } from "./elements.js";
import { barsOf } from "./figures.js";
import { duration } from "./format.js";
import { nodeLink } from "./sidebar_jump.js";
import { linesOf, lineText, reasonText, words } from "./words.js";

/** An icon beside the word: nothing is told by colour alone. */
const ICONS = {
  compiled: "pi-check-circle",
  replayed: "pi-check-circle",
  partly: "pi-chart-pie",
  building: "pi-cog",
  paused: "pi-pause",
  waiting: "pi-clock",
  eager: "pi-minus-circle",
  slower: "pi-exclamation-triangle",
  ready: "pi-check-circle",
  unused: "pi-exclamation-triangle",
};

export function modelsSection({ models = [], deepcaches = [], stepcaches = [], everywhere }) {
  const cards = [
    ...models.map(modelCard),
    ...deepcaches.map((cache) => cacheCard(cache, "DeepCache")),
    ...stepcaches.map((cache) => cacheCard(cache, "Step Cache")),
  ];
  const none = [
    el("p", words("page.no_models")),
    el(
      "div.buttons",
      button("make-faster", words("page.make_faster")),
      button("templates", words("page.browse_templates")),
    ),
  ];
  return section("models", ...(cards.length ? cards : none), leftAlone(everywhere?.left ?? []));
}

function standingMark(standing) {
  return el(
    "span",
    { class: `warmgraph-standing warmgraph-${standing}` },
    el("i", { class: `pi ${ICONS[standing] ?? "pi-circle"}`, "aria-hidden": "true" }),
    words(`page.standing_${standing}`),
  );
}

function modelCard(model) {
  const { regions = { total: 0 }, speed, stage } = model;
  const standing = stage === "compiling" && model.building?.paused ? "paused" : model.standing;
  const told = stage === "unused" || (["slower", "ready"].includes(stage) && model.standing !== "partly");
  return el(
    "article.card",
    { "data-key": model.id },
    el("h4", nodeLink(model), standingMark(told ? stage : standing)),
    model.by === "setting" && el("p.note", words("page.by_setting")),
    ...speedText(model),
    speedBars(model.model, speed),
    regions.total > 0 && el("p", words("page.parts", { compiled: regions.compiled, total: regions.total })),
    eagerDetails(model.eager ?? []),
    ...(model.notes ?? []).map((note) => el("p.note", note)),
    button("report", words("page.full_report"), {
      "data-id": model.id,
      class: "warmgraph-link",
      "aria-label": words("page.full_report_of", { model: model.model }),
    }),
  );
}

/** Models that the setting, which compiles all, did not take in the last prompt. */
function leftAlone(left) {
  if (!left.length) return undefined;
  const rows = left.map(({ node, class: kind, line }) => {
    const why = lineText(line);
    return el("li", node ? words("page.left_model", { node, kind, why }) : why);
  });
  return el(
    "details",
    { "data-key": "left" },
    el("summary", words("page.left_alone", { count: rows.length })),
    el("ul", ...rows),
  );
}

/** What is gained, in the server's words, or what to do where that is nothing. */
function speedText({ stage, said = [], lines = [], nodes = [], by, ready }) {
  if (stage === "ready" && ready) return [el("p", words("page.ready_detail"))];
  if (stage === "unused") return lines.slice(0, 1).map((line) => el("p.note", lineText(line)));
  if (!["faster", "same", "slower"].includes(stage)) return [];
  const look = stage === "faster" ? "warmgraph-factor" : "warmgraph-note";
  const texts = said.map((line) => el("p", { class: look }, lineText(line)));
  if (stage !== "slower") return texts;
  return [
    ...texts,
    el("p.note", words("page.slower_do")),
    by !== "setting" &&
      nodes.length > 0 &&
      button("bypass", words("page.bypass"), { "data-nodes": JSON.stringify(nodes) }),
  ];
}

function speedBars(name, speed) {
  const bars = barsOf(speed);
  if (!bars.length) return undefined;
  const rows = bars.map(({ form, ms, share, current }) =>
    el(
      "li",
      { class: current ? "warmgraph-current" : undefined },
      el("span", words(`page.form_${form}`)),
      el(
        "span.bar",
        { "aria-hidden": "true" },
        el("span", { class: `warmgraph-${form}`, style: `width: ${share.toFixed(1)}%` }),
      ),
      el("span.value", duration(ms)),
    ),
  );
  const caption = speed.size ? words("page.a_step_at", { size: speed.size }) : words("page.a_step");
  return el(
    "figure",
    el("figcaption", caption),
    el("ul.bars", { "aria-label": `${name}: ${caption}` }, ...rows),
  );
}

function eagerDetails(reasons) {
  if (!reasons.length) return undefined;
  const places = reasons.reduce((sum, entry) => sum + entry.places, 0);
  return el(
    "details",
    { "data-key": "eager" },
    el("summary", words("page.not_compiled", { count: places })),
    el(
      "ul",
      ...reasons.map(({ reason, reason_line: line, places: count }) =>
        el("li", words("page.reason", { count, reason: reasonText(line ?? reason) })),
      ),
    ),
  );
}

function cacheCard(cache, name) {
  return el(
    "article.card",
    { "data-key": cache.id },
    el("h4", name),
    ...linesOf(cache).map((line) => el("p", lineText(line))),
  );
}
