/** The open workflow as a file without nodes of ours, for who has no Warmgraph. It stays as it is. */
import { app } from "../../../scripts/app.js";
import { download, toast } from "./asking.js";
import { isOurs } from "./graph_places.js";
import "./locale.js";
import { words } from "./words.js";

const BYPASSED = 4;
/** What a subgraph's inputs and outputs are called at the ends of links. */
const INPUTS = -10;
const OUTPUTS = -20;

const NAMES = ["id", "origin_id", "origin_slot", "target_id", "target_slot", "type"];
const isNode = (id, node) => String(id) === String(node.id);

/**
 * @param {any} workflow as the host saves it
 * @returns {any} a copy; a node of ours between a subgraph's input and output stays, bypassed
 */
export function without(workflow) {
  const copy = structuredClone(workflow);
  for (const graph of [copy, ...(copy.definitions?.subgraphs ?? [])]) takeOurs(graph);
  return copy;
}

function takeOurs(graph) {
  const isList = graph.links.some(Array.isArray);
  const fromList = (link) => Object.fromEntries(NAMES.map((name, place) => [name, link[place]]));
  let links = isList ? graph.links.map(fromList) : graph.links;
  for (const node of graph.nodes.filter(({ type }) => isOurs({ comfyClass: type }))) {
    const into = links.filter(({ target_id: id }) => isNode(id, node));
    const pairs = links
      .filter(({ origin_id: id }) => isNode(id, node))
      .map((link) => {
        const { type } = node.outputs[link.origin_slot];
        const from = into.find(({ target_slot: slot }) => node.inputs[slot].type === type);
        return { link, from };
      });
    if (pairs.some(({ link, from }) => from?.origin_id === INPUTS && link.target_id === OUTPUTS)) {
      node.mode = BYPASSED;
      continue;
    }
    for (const { link, from } of pairs)
      if (from) Object.assign(link, { origin_id: from.origin_id, origin_slot: from.origin_slot });
    const gone = new Set([...into, ...pairs.filter(({ from }) => !from).map(({ link }) => link)]);
    links = links.filter((link) => !gone.has(link));
    graph.nodes = graph.nodes.filter((each) => each !== node);
  }
  tellEnds(graph, links);
  graph.links = isList ? links.map((link) => NAMES.map((name) => link[name])) : links;
}

/** What both ends of links, and their reroutes, say of them. */
function tellEnds(graph, links) {
  const ids = (end, id, slot) =>
    links
      .filter((link) => String(link[`${end}_id`]) === String(id) && link[`${end}_slot`] === slot)
      .map((link) => link.id);
  for (const { id, inputs = [], outputs = [] } of graph.nodes) {
    inputs.forEach((input, slot) => (input.link = ids("target", id, slot)[0] ?? null));
    outputs.forEach((output, slot) => (output.links = ids("origin", id, slot)));
  }
  if (graph.inputNode) {
    graph.inputs?.forEach((input, slot) => (input.linkIds = ids("origin", INPUTS, slot)));
    graph.outputs?.forEach((output, slot) => (output.linkIds = ids("target", OUTPUTS, slot)));
  }
  const left = new Set(links.map(({ id }) => id));
  for (const place of [graph, graph.extra ?? {}])
    for (const reroute of place.reroutes ?? [])
      reroute.linkIds = reroute.linkIds?.filter((id) => left.has(id));
  if (graph.extra?.linkExtensions)
    graph.extra.linkExtensions = graph.extra.linkExtensions.filter(({ id }) => left.has(id));
}

function exportWithout() {
  const { activeWorkflow } = app.extensionManager?.workflow ?? {};
  const name = `${activeWorkflow?.filename ?? "workflow"}.json`;
  download(name, JSON.stringify(without(app.rootGraph.serialize()), null, 2), "application/json");
  toast("success", `Warmgraph: ${words("page.exported")}`, words("page.exported_detail"), 8000);
}

const COMMAND = "Warmgraph.ExportWithout";

app.registerExtension({
  name: "Warmgraph.Workflow.Export",
  commands: [
    {
      id: COMMAND,
      icon: "pi pi-download",
      label: () => words("page.export_without"),
      function: exportWithout,
    },
  ],
  menuCommands: [{ path: ["File"], commands: [COMMAND] }],
});
