"""Turn a saved workflow (the page's format, schema 0.4) into a prompt of the API format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
_NEVER, _BYPASS = 2, 4  # `mode` of a muted and of a bypassed node
_PAGE_ONLY = ("Note", "MarkdownNote", "Reroute", "PrimitiveNode")

Workflow = Mapping[str, Any]
Node = Mapping[str, Any]


def to_prompt(workflow: Workflow, object_info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the prompt that the page sends for a workflow.

    Subgraphs are refused; values of primitive nodes are not carried over, nor those that a choice
    brings along.

    Args:
        workflow: The saved workflow.
        object_info: The server's answer to GET /object_info.

    Raises:
        ValueError: A node's class is unknown, or its widget values do not fit its inputs.
    """
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: (link[1], link[2]) for link in workflow["links"]}
    prompt: dict[str, dict[str, Any]] = {}
    for node in workflow["nodes"]:
        kind = node["type"]
        if kind in _PAGE_ONLY or node["mode"] in (_NEVER, _BYPASS):
            continue
        if kind not in object_info:
            raise ValueError(f"node {node['id']} must be of a known class, got {kind!r}")
        inputs = _widget_values(node, object_info[kind])
        for slot in node["inputs"]:
            source = _source(slot["link"], slot["type"], links, nodes)
            if source is not None:
                inputs[slot["name"]] = source
        title = node.get("title") or object_info[kind]["display_name"] or kind
        prompt[str(node["id"])] = {
            "inputs": inputs,
            "class_type": kind,
            "_meta": {"title": title},
        }
    return prompt


def _widget_values(node: Node, info: Mapping[str, Any]) -> dict[str, Any]:
    """Name a node's widget values, which are stored by position."""
    values = list(node.get("widgets_values") or [])
    named: dict[str, Any] = {}
    for name, kind, options in _declared(info):
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
    several types the first one's widget stands there.
    """
    if not isinstance(kind, list) and kind.split(",")[0] not in WIDGET_TYPES:
        return False
    return not options.get("forceInput")


def _source(
    link: int | None,
    kind: str,
    links: Mapping[int, tuple[int, int]],
    nodes: Mapping[int, Node],
) -> list[Any] | None:
    """Follow a link to the node that really gives the value, None when none does."""
    if link is None:
        return None
    node_id, slot = links[link]
    node = nodes[node_id]
    if node["type"] == "PrimitiveNode" or node["mode"] == _NEVER:
        return None
    if node["type"] == "Reroute":
        return _source(node["inputs"][0]["link"], kind, links, nodes)
    if node["mode"] == _BYPASS:
        passed = [i["link"] for i in node["inputs"] if i["type"] in (kind, "*") and not _widget(i)]
        return _source(passed[0], kind, links, nodes) if passed else None
    return [str(node_id), slot]


def _widget(slot: Mapping[str, Any]) -> bool:
    return "widget" in slot
