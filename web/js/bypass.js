/** Bypass nodes of ours that make a model slower; one undo takes that back. */
import { toast } from "./asking.js";
import { BYPASSED, inOneStep } from "./graph_edit.js";
import { isOpen, isOurs, nodeAt } from "./graph_places.js";
import { words } from "./words.js";

/** @param {{workflow: string | null, node: string}[]} nodes where they are, of any workflow */
export function bypass(nodes) {
  const found = nodes
    .filter(isOpen)
    .map(({ node }) => nodeAt(node))
    .filter(isOurs);
  if (!found.length) return toast("warn", `Warmgraph: ${words("page.not_open")}`, undefined, 8000);
  const active = found.filter(({ mode }) => mode !== BYPASSED);
  if (!active.length) return;
  inOneStep(() => {
    for (const node of active) node.mode = BYPASSED;
  });
}
