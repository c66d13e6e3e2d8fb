"""What a prompt says: the API's, node id -> class_type and inputs, a link being [id, output]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Prompt = dict[str, Any]
#: A node's output.
Origin = tuple[str, int]


def linked(inputs: object) -> Iterator[tuple[str, Origin]]:
    """Yield the inputs of a prompt's node that are links, and the outputs that they lead to."""
    for name, value in inputs.items() if isinstance(inputs, dict) else ():
        if (origin := as_link(value)) is not None:
            yield name, origin


def as_link(value: object) -> Origin | None:
    """Return the output that a value of an input is linked to, if it is a link."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    node, output = value
    if not isinstance(node, str) or type(output) is not int or output < 0:
        return None
    return node, output


def class_of(prompt: Mapping[str, Any], node: str) -> str | None:
    """Return the class of a prompt's node, None without a node or class."""
    entry = prompt.get(node)
    name = entry.get("class_type") if isinstance(entry, dict) else None
    return name if isinstance(name, str) else None


def above(prompt: Mapping[str, Any], nodes: Iterable[str]) -> set[str]:
    """Return these nodes of a prompt and all that lead to them."""
    found: set[str] = set()
    waiting = [node for node in nodes if class_of(prompt, node) is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            origins = (origin for _, (origin, _) in linked(prompt[node].get("inputs")))
            waiting += [each for each in origins if class_of(prompt, each) is not None]
    return found


def steps_of(prompt: Mapping[str, Any], node: str) -> int:
    """Return how many steps a sampler, or what its guider goes to, takes: by its own input, or by
    what gives it its sigmas; 0 where a link gives the number.
    """
    takers = [node]
    for each, entry in prompt.items():
        inputs = entry.get("inputs") if isinstance(entry, dict) else None
        if any(origin == node for _, (origin, _) in linked(inputs)):
            takers.append(each)
    for taker in takers:
        inputs = prompt[taker]["inputs"]
        sigmas = as_link(inputs.get("sigmas"))
        for each in [taker] if sigmas is None else above(prompt, [sigmas[0]]):
            steps = prompt[each]["inputs"].get("steps")
            if type(steps) is int:
                return steps
    return 0
