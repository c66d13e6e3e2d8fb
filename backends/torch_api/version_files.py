"""An installed package's version files, read without importing it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any


def constants_of(package: str, file: str) -> dict[str, Any]:
    """Read the constants that a file of an installed package assigns, without running it."""
    try:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return {}
        return constants_in(Path(spec.origin).with_name(file))
    except ValueError:
        return {}


def constants_in(path: Path) -> dict[str, Any]:
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        if isinstance(node.value, ast.Constant):
            found[name] = node.value.value
    return found
