/** The graphs on disk, by model family, with buttons to clear them. */
import { button, el, section } from "./elements.js";
import { bytes, number, percent, time } from "./format.js";
import { reasonText, words } from "./words.js";

/**
 * How many files a button would delete, and their bytes.
 * @param {"unused" | "unfit" | "all"} what
 */
export function clearable({ store, stored = [] }, what) {
  if (what === "all") return { files: store?.files ?? 0, size: store?.bytes ?? 0 };
  const parts =
    what === "unused"
      ? stored.map((each) => ({ files: each.unused_files, bytes: each.unused_bytes }))
      : stored.flatMap((each) => each.unfit ?? []);
  const sum = (name) => parts.reduce((total, part) => total + (part[name] ?? 0), 0);
  return { files: sum("files"), size: sum("bytes") };
}

export function storeSection(snapshot, busy) {
  const { store, stored = [] } = snapshot;
  return section(
    "store",
    ...(store ? usage(store) : []),
    stored.length > 0 && table(stored),
    ...unfitDetails(stored),
    el("div.buttons", ...["unused", "unfit", "all"].map((what) => clearButton(snapshot, what, busy))),
  );
}

function clearButton(snapshot, what, busy) {
  const { files } = clearable(snapshot, what);
  if (what === "unfit" && !files) return undefined;
  const action = `clear-${what}`;
  return button(action, words(`page.clear_${what}`), { disabled: !files || busy.has(action) });
}

function usage({ files, bytes: size, cap_bytes: cap, folder }) {
  const text = words("page.store_size", { size: bytes(size), cap: bytes(cap), count: files });
  const share = percent(size, cap).toFixed(1);
  return [
    el(
      "div",
      {
        class: "warmgraph-meter",
        role: "meter",
        "aria-label": words("page.store"),
        "aria-valuemin": 0,
        "aria-valuemax": 100,
        "aria-valuenow": share,
        "aria-valuetext": text,
      },
      el("div.fill", { style: `width: ${share}%` }),
    ),
    el("p", { title: folder && words("page.store_folder", { folder }) }, text),
  ];
}

function table(stored) {
  const heads = ["family", "files", "size", "last_used"].map((name) =>
    el("th", { scope: "col" }, words(`page.${name}`)),
  );
  const rows = stored.map((each) =>
    el(
      "tr",
      { "data-key": each.family },
      el("th", { scope: "row" }, each.title),
      el("td", number(each.files)),
      el("td", bytes(each.bytes)),
      el("td", each.last_used ? time(each.last_used) : ""),
    ),
  );
  return el(
    "table",
    { "aria-labelledby": "warmgraph-store" },
    el("thead", el("tr", ...heads)),
    el("tbody", ...rows),
  );
}

function unfitDetails(stored) {
  const reasons = stored.flatMap(({ title, unfit = [] }) =>
    unfit.map(({ reason: text, reason_line: line, files, bytes: size }) => {
      const reason = reasonText(line ?? text);
      return el("li", words("page.unfit_reason", { title, count: files, size: bytes(size), reason }));
    }),
  );
  if (!reasons.length) return [];
  const { files } = clearable({ stored }, "unfit");
  return [
    el(
      "details",
      { "data-key": "unfit" },
      el("summary", words("page.unfit", { count: files })),
      el("ul", ...reasons),
    ),
  ];
}
