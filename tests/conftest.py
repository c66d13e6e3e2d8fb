"""Shared fixtures: the pack's packages under an alias, and the real host inside this process."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: What runs on other hosts and other torches (`dev.py test --host ... --torch ...`), in about five
#: minutes: files or folders, and what a test's name there must hold one of, if not all count.
QUICK: dict[str, tuple[str, ...]] = {
    "unit": (),
    "compile": (),
    "engine/test_background.py": (),
    "engine/test_fresh_process.py": (),
    "engine/test_no_rebuild.py": (),
    "engine/test_other_torch.py": (),
    "engine/test_region.py": (),
    "host/test_workflows.py": ("imports", "text_to_image"),
}

# Spares workers most trials of the CPU's vector instructions, which each folder of theirs needs.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# torch's threads sleep while they wait for one another: on a machine that others share, those that
# spin make a test of one second take thirty. It has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _alias(name: str, folder: Path) -> None:
    """Import a package by its folder; the pack's root stays off sys.path, for it has `nodes`."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_alias("warmgraph_backends", ROOT / "backends")
_alias("warmgraph_tools", ROOT / "tools")

from warmgraph_tools import checkpoints, inprocess  # noqa: E402
from warmgraph_tools.host import Server  # noqa: E402
from warmgraph_tools.inprocess import Host  # noqa: E402
from warmgraph_tools.install import prepare_base  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick half."""
    for item in items:
        path = item.path.relative_to(ROOT / "tests")
        for part in (path, *path.parents):
            words = QUICK.get(part.as_posix())
            if words is not None and (not words or any(word in item.name for word in words)):
                item.add_marker("quick")


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
    """The real host imported into this process: CPU, GPUs' kind of attention, all core nodes."""
    argv = sys.argv
    base = tmp_path_factory.mktemp("comfy")
    try:
        yield inprocess.boot(host_tree, base)
    finally:
        sys.argv = argv


class InstallPack(Protocol):
    """Put a pack into the host's custom nodes and import it as the host does."""

    def __call__(self, name: str, files: dict[str, str]) -> Path: ...


@pytest.fixture
def install_pack(host: Host) -> Iterator[InstallPack]:
    """`install_pack(name, {path: text})`: returns its folder. Afterwards the packs are gone, and
    what they put into the host's and torch's places is put back.
    """
    import comfy.ldm.modules.attention as attention
    import torch

    places: list[tuple[Any, str]] = [
        (attention.BasicTransformerBlock, "forward"),
        (attention.SpatialTransformer, "forward"),
        (attention, "optimized_attention"),
        (torch.nn.functional, "scaled_dot_product_attention"),
        (torch.nn.GroupNorm, "forward"),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name in places]
    modules, folders = set(sys.modules), []

    def install(name: str, files: dict[str, str]) -> Path:
        folder = host.base / "custom_nodes" / name
        folders.append(folder)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, "utf-8")
        assert asyncio.run(host.nodes.load_custom_node(str(folder)))
        return folder

    yield install
    for owner, attribute, value in before:
        setattr(owner, attribute, value)
    for module in [m for m in sys.modules if m not in modules]:
        if any(module.startswith(str(folder)) for folder in folders):
            del sys.modules[module]
    for folder in folders:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def start_server(
    host_tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Start real servers with the pack installed; all that still run are stopped at the end.

    `start_server(base=None, flags=("--cpu",), pack=True, narrow=True, environment=None,
    graphs_from=None)`: a fresh base directory unless one is given; `Server.restart()` keeps it.
    `graphs_from` is a server that runs nothing now: its store and private folder (signing key,
    comparisons, settings) are copied, to spare a test the builds.
    """
    started: list[Server] = []

    def start(
        base: Path | None = None,
        *,
        pack: bool = True,
        narrow: bool = True,
        graphs_from: Server | None = None,
        **options: Any,
    ) -> Server:
        base = prepare_base(
            base or tmp_path_factory.mktemp("base"), host_tree, pack=pack, narrow=narrow
        )
        for part in ("models/compiled_graphs", "user/__warmgraph"):
            if graphs_from is not None and (graphs_from.base / part).is_dir():
                shutil.copytree(graphs_from.base / part, base / part, dirs_exist_ok=True)
        server = Server(host_tree, base, **options)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Server]) -> Server:
    """One server that all tests share: leave it running, and no setting changed."""
    return start_server()


class PlaceModel(Protocol):
    """Write a model file where a server finds it; returns the name that its loaders take."""

    def __call__(
        self,
        server: Server,
        kind: str,
        *,
        name: str | None = None,
        seed: int = 0,
        base: str | None = None,
    ) -> str: ...


@pytest.fixture(scope="session")
def place_model(host: Host) -> PlaceModel:
    """`place_model(server, kind, name=..., seed=..., base=...)`; kinds in `checkpoints.FOLDERS`."""

    def place(
        server: Server,
        kind: str,
        *,
        name: str | None = None,
        seed: int = 0,
        base: str | None = None,
    ) -> str:
        models = server.base / "models"
        return checkpoints.ensure(models, kind, seed=seed, base=base, name=name).name

    return place
