"""Turn a saved workflow (the page's format, schema 0.4) into a prompt of the API format."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
#: What the page sends of widgets that only show something; no workflow holds it.
_SHOWING = {"IMAGECOMPARE": {"__value__": ["", ""]}}
_NEVER, _BYPASS = 2, 4  # `mode` of a muted and of a bypassed node
_INPUTS = -10  # the id of a subgraph's inputs, within it
_PAGE_ONLY = ("Note", "MarkdownNote", "Reroute", "PrimitiveNode")

Workflow = Mapping[str, Any]
Node = Mapping[str, Any]


class _Flat(NamedTuple):
    """A workflow with its subgraphs' nodes beside the others, as "OUTER:INNER".

    Attributes:
        nodes: all of them, by their id.
        links: where each link comes from: a node and its output.
        passed: outputs that a node only passes on, and the links to them: a subgraph's own, and
            what comes into it.
        given: values of widgets on the subgraph's node, by node and widget.
    """

    nodes: dict[str, Node]
    links: dict[str, tuple[str, int]]
    passed: dict[tuple[str, int], str | None]
    given: dict[str, dict[str, Any]]


def to_prompt(
    workflow: Workflow, object_info: Mapping[str, Any], *, ends: Container[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the prompt that the page sends for a workflow.

    Nodes of subgraphs are beside the rest, under ids such as "OUTER:INNER". Values of primitive
    nodes are not carried over, nor those that a choice adds, nor those that a subgraph's node shows
    without an input for them: the page keeps the latter where they count.

    Args:
        workflow: The saved workflow.
        object_info: The server's answer to GET /object_info.
        ends: Classes of the wanted nodes, with all that they need; None is all nodes.

    Raises:
        ValueError: A node's class is unknown, or its widget values do not fit its inputs.
    """
    subgraphs = {each["id"]: each for each in workflow.get("definitions", {}).get("subgraphs", ())}
    flat = _Flat({}, {}, {}, {})
    _flatten(workflow, "", subgraphs, flat)
    there = {place: node for place, node in flat.nodes.items() if _is_sent(node)}
    wanted = [place for place, node in there.items() if ends is None or node["type"] in ends]
    prompt: dict[str, dict[str, Any]] = {}
    for place in wanted:  # it grows
        if place not in prompt:
            prompt[place] = _entry(place, there[place], flat, object_info)
            wanted += sources_of(prompt[place])
    return prompt


def sources_of(entry: Mapping[str, Any]) -> list[str]:
    """Return the ids of the nodes that a prompt's node is linked to."""
    values = entry["inputs"].values()
    return [str(value[0]) for value in values if isinstance(value, list) and len(value) == 2]


def _is_sent(node: Node) -> bool:
    return node["type"] not in _PAGE_ONLY and _mode(node) not in (_NEVER, _BYPASS)


def _mode(node: Node) -> int:
    return int(node.get("mode", 0))


def _entry(place: str, node: Node, flat: _Flat, object_info: Mapping[str, Any]) -> dict[str, Any]:
    """A node's entry in a prompt."""
    kind = node["type"]
    if kind not in object_info:
        raise ValueError(f"node {place} must be of a known class, got {kind!r}")
    inputs = _widget_values(node, object_info[kind]) | flat.given.get(place, {})
    for slot in node.get("inputs", ()):
        source = _source(_named(place, slot["link"]), slot["type"], flat)
        if source is not None:
            inputs[slot["name"]] = source
    title = node.get("title") or object_info[kind]["display_name"] or kind
    return {"inputs": inputs, "class_type": kind, "_meta": {"title": title}}


def _named(place: str, link: int | None) -> str | None:
    """The name of a link in the graph of a node."""
    return None if link is None else f"{place.rpartition(':')[0]}:{link}"


def _flatten(graph: Workflow, outer: str, subgraphs: Mapping[str, Workflow], flat: _Flat) -> None:
    """Put a graph's nodes and links into `flat`; `outer` is the place of the node that it is in."""
    before = f"{outer}:" if outer else ""
    for link in graph["links"]:
        number, origin, slot, *_ = link.values() if isinstance(link, dict) else link
        flat.links[f"{outer}:{number}"] = (f"{before}{origin}", slot)
    for node in graph["nodes"]:
        place = f"{before}{node['id']}"
        if node["type"] not in subgraphs or _mode(node) in (_NEVER, _BYPASS):
            flat.nodes[place] = node
            continue
        inner = subgraphs[node["type"]]
        _pass_on(node, place, inner, flat)
        _flatten(inner, place, subgraphs, flat)


def _pass_on(node: Node, place: str, inner: Workflow, flat: _Flat) -> None:
    """Link a subgraph's inside to what is around its node."""
    for slot, output in enumerate(inner["outputs"]):
        link = next(iter(output["linkIds"]), None)
        flat.passed[place, slot] = None if link is None else f"{place}:{link}"
    entered = {entry["name"]: entry["link"] for entry in node["inputs"]}
    values = list(node.get("widgets_values") or [])
    chosen = flat.given.get(place, {})  # on the node of the subgraph that this one is in
    nodes = {each["id"]: each for each in inner["nodes"]}
    targets = {
        link["id"]: link["target_id"] for link in inner["links"] if link["origin_id"] == _INPUTS
    }
    for slot, entry in enumerate(inner["inputs"]):
        name = entry["name"]
        flat.passed[f"{place}:{_INPUTS}", slot] = _named(place, entered.get(name))
        widgets = [
            (f"{place}:{targets[number]}", each["widget"]["name"])
            for number in entry["linkIds"]
            for each in nodes[targets[number]]["inputs"]
            if each["link"] == number and _widget(each)
        ]
        if widgets and (values or name in chosen):
            value = values.pop(0) if values else None
            for target, widget in widgets:
                flat.given.setdefault(target, {})[widget] = chosen.get(name, value)
    if values:
        raise ValueError(f"node {place} ({inner['name']}) has values left over: {values}")


def _widget_values(node: Node, info: Mapping[str, Any]) -> dict[str, Any]:
    """Name a node's widget values, which are stored by position."""
    values = node.get("widgets_values") or []
    if isinstance(values, dict):  # some packs save them by name
        declared = {name for name, *_ in _declared(info)}
        return {name: value for name, value in values.items() if name in declared}
    values = list(values)
    named: dict[str, Any] = {}
    for name, kind, options in _declared(info):
        if isinstance(kind, str) and kind in _SHOWING:
            named[name] = _SHOWING[kind]
        if not _is_widget(kind, options):
            continue
        if not values:
            raise ValueError(f"node {node['id']} ({node['type']}) has no value for {name!r}")
        named[name] = values.pop(0)
        if options.get("control_after_generate") or options.get("image_upload"):
            del values[:1]  # the page's own widget behind a seed or a picture
    if values:
        raise ValueError(f"node {node['id']} ({node['type']}) has values left over: {values}")
    return named


def _declared(info: Mapping[str, Any]) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Return (name, type, options) of a class's inputs in their order."""
    found = []
    for group in ("required", "optional"):
        declared = info["input"].get(group, {})
        for name in info["input_order"].get(group, declared):
            kind, *rest = declared[name]
            found.append((name, kind, rest[0] if rest else {}))
    return found


def _is_widget(kind: Any, options: Mapping[str, Any]) -> bool:
    """Tell a widget from a socket; a list of choices is the older way to declare a combo, and of
    several types the first one's widget is shown.
    """
    if not isinstance(kind, list) and kind.split(",")[0] not in WIDGET_TYPES:
        return False
    return not options.get("forceInput")


def _source(link: str | None, kind: str, flat: _Flat) -> list[Any] | None:
    """Follow a link to the node that provides the value, None if none does."""
    if link is None:
        return None
    place, slot = flat.links[link]
    if (place, slot) in flat.passed:
        return _source(flat.passed[place, slot], kind, flat)
    node = flat.nodes[place]
    if node["type"] == "PrimitiveNode" or _mode(node) == _NEVER:
        return None
    if node["type"] == "Reroute":
        return _source(_named(place, node["inputs"][0]["link"]), kind, flat)
    if _mode(node) == _BYPASS:
        passed = [i["link"] for i in node["inputs"] if i["type"] in (kind, "*") and not _widget(i)]
        return _source(_named(place, passed[0]), kind, flat) if passed else None
    return [place, slot]


def _widget(slot: Mapping[str, Any]) -> bool:
    return "widget" in slot
