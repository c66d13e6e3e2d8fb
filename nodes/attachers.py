"""Which nodes of the running prompt correspond to what our nodes attached to its models.

The host's cache serves a node's output to any node of another prompt with the same class, inputs
and ancestors, whatever its id: such nodes are recognised by these.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from ..backends.engine import AttachedBy
from ..backends.host_api.execution import executing_node
from .placing import Prompt, as_link, class_of
from .workflow import placed_before, running, workflow_id


def attached_by(before: AttachedBy | None) -> AttachedBy | None:
    """Return what attached a session in the running prompt.

    Args:
        before: the result for the same session in an earlier run, None while its node runs.

    Returns:
        None if unknown.
    """
    prompt, extra_data = running()
    if before is None:
        node = executing_node()
        if node is None:
            return None
        made_of, nodes = _Making(prompt).of(node), [node]
    else:
        made_of, nodes = before.made_of, _nodes(prompt, before.made_of)
        if not nodes:
            return None
    known: list[str] = []
    placed = [placed_before(extra_data, node) for node in nodes]
    for node, consumers in zip(nodes, placed, strict=True):
        known += consumers or (node,)
    places = tuple(map(page_place, known))
    return AttachedBy(
        made_of,
        workflow_id(extra_data),
        places,
        by_setting=all(placed),
        has_ended=lambda: running()[0] is not prompt,
    )


def page_place(node_id: str) -> str:
    """Return a node's place in the prompt as the page writes it: "12:3" for node 3 in the subgraph
    of node 12. Command line clients, which expand subgraphs themselves, write "12/3".
    """
    return node_id.replace("/", ":")


def _nodes(prompt: Prompt, made_of: tuple[str, str]) -> list[str]:
    """Return the nodes of a prompt that are made alike."""
    making = _Making(prompt)
    same = (node for node in prompt if class_of(prompt, node) == made_of[0])
    return [node for node in same if making.of(node) == made_of]


class _Making:
    """How nodes of a prompt are made: classes and inputs, including all ancestors."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._known: dict[str, str] = {}

    def of(self, node: str) -> tuple[str, str]:
        """Return a node's class, and how it is made as a text, equal for equal ones."""
        return class_of(self._prompt, node) or "", self._text(node)

    def _text(self, node: str) -> str:
        if node not in self._known:
            self._known[node] = ""  # stops at a cycle, which the host refuses
            entry = self._prompt.get(node, {})
            inputs = sorted(entry.get("inputs", {}).items())
            made = [(name, self._value(value)) for name, value in inputs]
            text = repr((entry.get("class_type"), made))
            self._known[node] = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return self._known[node]

    def _value(self, value: Any) -> Any:
        origin = as_link(value)
        return value if origin is None else (self._text(origin[0]), origin[1])
