/** The GPU's memory that captured steps hold, with a button that gives it back. */
import { button, el } from "./elements.js";
import { bytes } from "./format.js";
import { words } from "./words.js";

/**
 * @param {Record<string, any>} snapshot
 * @param {Set<string>} busy
 */
export function memorySection({ captured }, busy) {
  if (!captured?.budget_bytes && !captured?.vram_bytes) return undefined; // no GPU
  const { vram_bytes: held, budget_bytes: budget } = captured;
  return el(
    "section",
    { "data-key": "memory", "aria-labelledby": "warmgraph-memory" },
    el("h3", { id: "warmgraph-memory" }, words("page.memory")),
    el("p", {}, words("page.captured", { size: bytes(held), budget: bytes(budget) })),
    el(
      "div",
      { class: "warmgraph-buttons" },
      button("free", words("page.give_back"), { disabled: !held || busy.has("free") }),
    ),
  );
}
