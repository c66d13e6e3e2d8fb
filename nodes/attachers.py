"""Which nodes of the prompt that runs now stand for what our nodes attached to one of its models.

The host's cache serves what a node gave to any node of another prompt that has the same class, the
same inputs and the same above it, whatever its id: those are told by what they are made of.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from ..backends.engine import AttachedBy
from ..backends.host_api.execution import executing_node
from .placing import Prompt, as_link, class_of
from .workflow import placed_before, running, workflow_id


def attached_by(before: AttachedBy | None) -> AttachedBy | None:
    """Return what of the prompt that runs now attached a session.

    Args:
        before: what was told of the same session in an earlier run, None as the node that attaches
            it runs now.

    Returns:
        None where nothing tells.
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
    of node 12. Clients at a command line, which take subgraphs apart themselves, write "12/3".
    """
    return node_id.replace("/", ":")


def _nodes(prompt: Prompt, made_of: tuple[str, str]) -> list[str]:
    """Return the nodes of a prompt that are made of the same."""
    making = _Making(prompt)
    same = (node for node in prompt if class_of(prompt, node) == made_of[0])
    return [node for node in same if making.of(node) == made_of]


class _Making:
    """What nodes of a prompt are made of: classes and inputs, of all that is above them, too."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._known: dict[str, str] = {}

    def of(self, node: str) -> tuple[str, str]:
        """Return a node's class, and its making as a text; equal for equal ones."""
        return class_of(self._prompt, node) or "", self._text(node)

    def _text(self, node: str) -> str:
        if node not in self._known:
            self._known[node] = ""  # for a circle, which the host has refused
            entry = self._prompt.get(node, {})
            inputs = sorted(entry.get("inputs", {}).items())
            made = [(name, self._value(value)) for name, value in inputs]
            text = repr((entry.get("class_type"), made))
            self._known[node] = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return self._known[node]

    def _value(self, value: Any) -> Any:
        origin = as_link(value)
        return value if origin is None else (self._text(origin[0]), origin[1])
