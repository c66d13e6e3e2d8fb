"""Shared fixtures: the pack's packages under an alias, and the real host inside this process."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _alias(name: str, folder: Path) -> None:
    """Import the package in `folder` as `name`; the pack's root stays off sys.path: it has `nodes`."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_alias("warmgraph_backends", ROOT / "backends")
_alias("warmgraph_tools", ROOT / "tools")

from warmgraph_tools import inprocess  # noqa: E402
from warmgraph_tools.inprocess import Host  # noqa: E402


def find_host_tree() -> Path | None:
    """The ComfyUI tree that `dev.py` made (or WARMGRAPH_HOST names), None when there is none."""
    named = os.environ.get("WARMGRAPH_HOST")
    tree = Path(named) if named else ROOT / ".host" / "0.30.0"
    return tree.resolve() if (tree / "main.py").is_file() else None


@pytest.fixture(scope="session")
def host_tree() -> Path:
    """Path of the real ComfyUI tree."""
    tree = find_host_tree()
    if tree is None:
        pytest.skip("no ComfyUI tree: run `python dev.py test`, or set WARMGRAPH_HOST to one")
    return tree


@pytest.fixture(scope="session")
def host(host_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The real host imported into this process: CPU, the attention that GPUs use, all core nodes."""
    argv = sys.argv
    base = tmp_path_factory.mktemp("comfy")
    try:
        yield inprocess.boot(host_tree, base)
    finally:
        sys.argv = argv
