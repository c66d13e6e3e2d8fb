"""How nodes of a prompt are made: by that the host's cache knows them again in other prompts."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from .reading import Prompt, as_link, class_of


def alike(prompt: Prompt, made_of: tuple[str, str]) -> list[str]:
    """Return the nodes of a prompt that are made alike."""
    making = Making(prompt)
    same = (node for node in prompt if class_of(prompt, node) == made_of[0])
    return [node for node in same if making.of(node) == made_of]


class Making:
    """Classes and inputs, including all ancestors."""

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
