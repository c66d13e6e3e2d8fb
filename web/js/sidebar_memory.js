/** The GPU's memory that captured steps hold, with a button that gives it back. */
import { button, el, section } from "./elements.js";
import { bytes } from "./format.js";
import { words } from "./words.js";

export function memorySection({ captured }, busy) {
  if (!captured?.budget_bytes && !captured?.vram_bytes) return undefined; // no GPU
  const { vram_bytes: held, budget_bytes: budget } = captured;
  return section(
    "memory",
    el("p", words("page.captured", { size: bytes(held), budget: bytes(budget) })),
    el("div.buttons", button("free", words("page.give_back"), { disabled: !held || busy.has("free") })),
  );
}
