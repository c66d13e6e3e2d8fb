"""Walks a described module tree (`describe.describe_module`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def walk(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the modules of a tree with their paths, each before those below it."""
    yield path, tree
    for name, child in tree["modules"]:
        yield from walk(child, f"{path}.{name}" if path else name)


def parameters(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a tree's parameters, by their paths: shape and dtype."""
    for path, module in walk(tree):
        for name, meta in module["parameters"].items():
            if meta is not None:
                yield (f"{path}.{name}" if path else name), meta
