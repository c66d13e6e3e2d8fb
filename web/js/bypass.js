/** Bypass nodes of ours that make a model slower; one undo takes that back. */
import { app } from "../../../scripts/app.js";
import { toast } from "./asking.js";
import { nodeAt } from "./graph_places.js";
import { words } from "./words.js";

/** The host's mode of a node that hands its input on. */
const BYPASSED = 4;

/** @param {{workflow: string | null, node: string}[]} nodes where they are, of any workflow */
export function bypass(nodes) {
  const found = nodes.filter(isOpen).map(({ node }) => nodeAt(node)).filter(Boolean);
  if (!found.length) return toast("warn", `Warmgraph: ${words("page.not_open")}`, undefined, 8000);
  app.canvas?.emitBeforeChange?.();
  for (const node of found) node.mode = BYPASSED;
  app.canvas?.emitAfterChange?.();
  app.canvas?.setDirty?.(true, true);
}

/**
 * Whether a node's workflow is the one in front, as far as is known.
 * @param {{workflow: string | null}} place
 */
export function isOpen({ workflow }) {
  return !workflow || workflow === app.rootGraph?.id;
}
