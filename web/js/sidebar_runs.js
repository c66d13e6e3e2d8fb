/** The last runs: how long a step took, as a plot, as a table and as a file. */
import { button, el, section, svg } from "./elements.js";
import { dotsOf, seriesOf } from "./figures.js";
import { duration, number, time } from "./format.js";
import { words } from "./words.js";

/** Rows of the table; the file has all. */
const SHOWN = 10;
/** Of the plot, in its own units, and the room around it for dots and labels. */
const WIDTH = 280;
const HEIGHT = 70;
const ROOM = 6;

export function runsSection({ runs = [] }) {
  return section(
    "runs",
    ...(runs.length ? [plot(seriesOf(runs)), table(runs), exportButton()] : []),
    runs.length === 0 && el("p", words("page.no_runs")),
  );
}

function exportButton() {
  return el("div.buttons", button("export", words("page.export")));
}

function plot(series) {
  if (series.length < 2) return undefined;
  const { dots, top, eager } = dotsOf(series, WIDTH, HEIGHT);
  const { model, size, ms } = series[series.length - 1];
  const label = words("page.plot", {
    model,
    size,
    count: series.length,
    first: duration(series[0].ms),
    last: duration(ms),
  });
  const across = (y, name) => svg("line", { x1: 0, x2: WIDTH, y1: y, y2: y, class: `warmgraph-${name}` });
  return el(
    "figure",
    el("figcaption", `${model}, ${size}`),
    svg(
      "svg",
      {
        role: "img",
        "aria-label": label,
        class: "warmgraph-plot",
        viewBox: `${-ROOM} ${-ROOM} ${WIDTH + 2 * ROOM} ${HEIGHT + 2 * ROOM}`,
      },
      across(HEIGHT, "axis"),
      eager !== undefined && across(eager, "without"),
      svg("polyline", { points: dots.map(({ x, y }) => `${x},${y}`).join(" ") }),
      ...dots.map(({ x, y, run }) =>
        svg(
          "circle",
          { cx: x, cy: y, r: 3, class: `warmgraph-${run.form}` },
          svg("title", {}, `${time(run.at)}: ${duration(run.ms)}`),
        ),
      ),
    ),
    el(
      "p.note",
      words(eager === undefined ? "page.plot_key" : "page.plot_key_eager", { top: duration(top) }),
    ),
  );
}

function table(runs) {
  const heads = ["run", "form", "a_step"].map((name) => el("th", { scope: "col" }, words(`page.${name}`)));
  const newest = runs.slice(-SHOWN).reverse();
  return el(
    "table",
    { "aria-labelledby": "warmgraph-runs" },
    el("thead", el("tr", ...heads)),
    el("tbody", ...newest.map(row)),
  );
}

function row({ at, model, size, batch, steps, form, ms }) {
  const images = batch > 1 ? `${number(batch)} x ${size}` : size;
  return el(
    "tr",
    el(
      "td",
      el("div", `${model}, ${images}`),
      el("div.note", `${time(at)}, ${words("page.steps", { count: steps })}`),
    ),
    el("td", words(`page.form_${form}`)),
    el("td.value", ms === null ? "" : duration(ms)),
  );
}
