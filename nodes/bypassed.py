"""Which inputs of a prompt lie behind a bypassed node, by the workflow that the page sends along.

A prompt does not contain bypassed or muted nodes: the page has linked past them. A workflow has its
nodes and links as the page draws them: a subgraph's nodes are in a separate graph, once under
`definitions`, however often it is used. A prompt calls such a node "57:62", or "57/62".

https://docs.comfy.org/specs/workflow_json
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from .placing import MAX_STEPS, Kind, may_carry

#: Modes of nodes that the page takes out of a prompt: muted and bypassed.
_OUT = (2, 4)
#: In a subgraph's links, what stands for its inputs and outputs.
_INPUTS, _OUTPUTS = "-10", "-20"
#: Of subgraphs within one another.
_DEPTH = 32
_GETTERS, _SETTERS = ("GetNode",), ("SetNode",)


class _Link(NamedTuple):
    """From a node's output to a node's input."""

    origin: str
    output: int
    target: str
    input: int


class _Graph:
    """The nodes and links of a workflow or of one of its subgraphs."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.nodes = {str(n["id"]): n for n in _tables(data.get("nodes")) if "id" in n}
        self.inputs = list(_tables(data.get("inputs")))
        self._links = dict(_links(data.get("links")))
        self._out = {link.input: link for link in self._links.values() if link.target == _OUTPUTS}

    def link(self, number: object) -> _Link | None:
        """Return the link of this number."""
        return self._links.get(str(number))

    def link_out(self, output: int) -> _Link | None:
        """Return the link into a subgraph's output."""
        return self._out.get(output)


class _Spot(NamedTuple):
    """A node on the way up: which, within which subgraphs, and by which output."""

    path: tuple[str, ...]
    node: str
    output: int


class Workflow:
    """A workflow, for questions about the way to inputs of its prompt."""

    def __init__(self, data: object) -> None:
        """Read a workflow.

        Args:
            data: `extra_pnginfo.workflow`; ignored if it has another shape.
        """
        data = data if isinstance(data, dict) else {}
        self._root = _Graph(data)
        definitions = data.get("definitions")
        listed = definitions.get("subgraphs") if isinstance(definitions, dict) else None
        self._subgraphs = {str(each.get("id")): _Graph(each) for each in _tables(listed)}
        self._steps = MAX_STEPS

    def is_bypassed(self, node: str, input_name: str, kind: Kind) -> bool:
        """Whether a bypassed or muted node that compiles this kind lies on the way to an input."""
        *path, name = re.split("[:/]", node)
        graph = self._graph(tuple(path))
        while graph is None and path:  # within a node that is not a subgraph's
            *path, name = path
            graph = self._graph(tuple(path))
        if graph is None or name not in graph.nodes:
            return False
        return self._walk(tuple(path), name, input_name, kind)

    def _walk(self, path: tuple[str, ...], node: str, input_name: str, kind: Kind) -> bool:
        graph = self._graph(path)
        assert graph is not None
        wanted = [each for each in _inputs(graph.nodes[node]) if each.get("name") == input_name]
        seen: set[_Spot] = set()
        waiting = deque(self._above(path, node, kind, wanted or None))
        while waiting:
            spot = waiting.popleft()
            if spot in seen:
                continue
            seen.add(spot)
            self._steps -= 1
            if self._steps < 0:
                return False
            found = self._node(spot)
            if found.get("type") in (kind.node, kind.instead or kind.node) and self._is_out(spot):
                return True
            waiting.extend(self._through(spot, found, kind))
        return False

    def _through(self, spot: _Spot, found: dict[str, Any], kind: Kind) -> Iterator[_Spot]:
        """Yield what leads to an output of a node."""
        inner = self._subgraphs.get(str(found.get("type")))
        if inner is not None and len(spot.path) < _DEPTH:
            link = inner.link_out(spot.output)
            if link is not None:
                yield from self._origin((*spot.path, spot.node), link)
            if found.get("mode") not in _OUT:
                return
        if found.get("type") in _GETTERS:
            yield from self._setters(spot, found)
        yield from self._above(spot.path, spot.node, kind)

    def _above(
        self,
        path: tuple[str, ...],
        node: str,
        kind: Kind,
        inputs: list[dict[str, Any]] | None = None,
    ) -> Iterator[_Spot]:
        """Yield what is linked to inputs of a node; by default to all that may carry a kind. A
        merge passes on a clone of its first model, as in `placing`.
        """
        graph = self._graph(path)
        if graph is None or node not in graph.nodes:
            return
        if inputs is None:
            inputs = [
                each
                for each in _inputs(graph.nodes[node])
                if not isinstance(each.get("type"), str) or may_carry(each["type"], kind)
            ]
            merged = [each for each in inputs if each.get("type") == kind.type]
            inputs = [each for each in inputs if each not in merged[1:]]
        for each in inputs:
            link = graph.link(each.get("link"))
            if link is not None:
                yield from self._origin(path, link)

    def _origin(self, path: tuple[str, ...], link: _Link) -> Iterator[_Spot]:
        """Yield where a link of a graph begins; for a subgraph's input that is outside of it."""
        if link.origin != _INPUTS:
            yield _Spot(path, link.origin, link.output)
        elif path:
            *outer, node = path
            graph, inner = self._graph(tuple(outer)), self._graph(path)
            if graph is None or inner is None or link.output >= len(inner.inputs):
                return
            name = inner.inputs[link.output].get("name")
            for each in _inputs(graph.nodes[node]):
                above = graph.link(each.get("link"))
                if each.get("name") == name and above is not None:
                    yield from self._origin(tuple(outer), above)

    def _setters(self, spot: _Spot, found: dict[str, Any]) -> Iterator[_Spot]:
        """Yield what sets a name that another node gets, without a link between them."""
        for depth in range(len(spot.path), -1, -1):
            graph = self._graph(spot.path[:depth])
            for name, node in graph.nodes.items() if graph is not None else ():
                if node.get("type") in _SETTERS and _values(node) == _values(found):
                    yield _Spot(spot.path[:depth], name, 0)

    def _is_out(self, spot: _Spot) -> bool:
        """Whether a node, or a subgraph that it lies in, is muted or bypassed."""
        places = [*(spot.path[:n] for n in range(1, len(spot.path) + 1)), (*spot.path, spot.node)]
        nodes = (self._node(_Spot(place[:-1], place[-1], 0)) for place in places)
        return any(node.get("mode") in _OUT for node in nodes)

    def _node(self, spot: _Spot) -> dict[str, Any]:
        graph = self._graph(spot.path)
        return graph.nodes.get(spot.node, {}) if graph is not None else {}

    def _graph(self, path: tuple[str, ...]) -> _Graph | None:
        """Return the graph within these subgraph nodes."""
        graph: _Graph | None = self._root
        for node in path:
            kind = graph.nodes.get(node, {}).get("type") if graph is not None else None
            graph = self._subgraphs.get(str(kind))
        return graph


def _links(listed: object) -> Iterator[tuple[str, _Link]]:
    """Yield links by number: lists in the root of a workflow, tables in subgraphs."""
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot")
    for each in listed if isinstance(listed, list) else ():
        parts = [each.get(n) for n in names] if isinstance(each, dict) else each
        if not isinstance(parts, list) or len(parts) < len(names):
            continue
        number, origin, output, target, taken = parts[: len(names)]
        if isinstance(output, int) and isinstance(taken, int):
            yield str(number), _Link(str(origin), output, str(target), taken)


def _inputs(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return _tables(node.get("inputs"))


def _values(node: dict[str, Any]) -> Any:
    """The first value of a node's widgets."""
    values = node.get("widgets_values")
    return values[0] if isinstance(values, list) and values else None


def _tables(listed: object) -> Iterator[dict[str, Any]]:
    """Yield the tables of what should be a list of them."""
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict):
            yield each
