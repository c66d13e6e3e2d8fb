/** From a model's card in the tab to the node that it comes from, through subgraphs' borders. */
import { toast } from "./asking.js";
import { button } from "./elements.js";
import { goTo, isOpen, nodeAt } from "./graph_places.js";
import { nodeShowing } from "./node_badge.js";
import { words } from "./words.js";

/** A model's name; a button where it has a node. */
export function nodeLink({ id, model, nodes = [] }) {
  if (!nodes.length) return model;
  const label = words("page.show_node", { model });
  return button("node", model, {
    "data-id": id,
    class: "warmgraph-link warmgraph-jump",
    title: label,
    "aria-label": label,
  });
}

export async function showNode({ id, nodes = [] } = {}) {
  const here = nodes.filter(isOpen);
  const found = nodeShowing(id) ?? here.map(({ node }) => nodeAt(node)).find(Boolean);
  if (found) return goTo(found);
  toast("warn", words("page.no_node"), words("page.no_node_detail"), 6000);
}
