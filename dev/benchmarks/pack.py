"""Bring the pack's own engine into a benchmark process, outside a server.

The pack's root must stay off `sys.path` (its `nodes` would hide the host's), so its packages are
imported under alias names.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.1


def import_alias(name: str, folder: Path) -> None:
    """Import the package in `folder` under another name, once."""
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"package must lie in {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def import_engine() -> Any:
    """Import the pack's engine and return the module, as a server does at its start."""
    return import_engine_package("engine")


def import_engine_package(name: str) -> Any:
    """Import a module of the pack's `backends`, which imports no host by itself."""
    import_alias("warmgraph_backends", ROOT / "backends")
    return importlib.import_module(f"warmgraph_backends.{name}")


def open_engine(
    store: Path,
    *,
    workers: int = 0,
    user: Path | None = None,
    workflow: Callable[[], Any] = lambda: None,
    captured: bool = True,
    learned: bool = True,
) -> Any:
    """Open an engine on its own store; settings and key lie beside it. `WARMGRAPH_DEBUG` counts.

    Args:
        store: the shared store's folder; an empty or missing one means that everything must be
            built.
        workers: worker processes; 0 is the pack's default.
        user: the user's folder, in which `workflows/` lies; None is nobody's.
        workflow: the saved workflow of the prompt that runs now, a `WorkflowRef` or None.
        captured: replay hot calls from CUDA graphs; without it regions alone are measured.
        learned: learn models that no family describes.
    """
    engine = import_engine()
    from warmgraph_backends.debugging import VARIABLE, read_debugging
    from warmgraph_backends.sessions.settings import SETTINGS, Settings

    private = store.with_name(store.name + "-private")
    store.mkdir(parents=True, exist_ok=True)
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = Settings(private)
    share = SETTINGS["captured_vram_percent"].default if captured else 0
    settings.update(
        {
            "workers": workers,
            "captured_vram_percent": share,
            "learn_models": learned,
        }
    )
    hooks = engine.Hooks(
        current_workflow=workflow, on_change=lambda: None, check_cancelled=lambda: None
    )
    workflows = None if user is None else user / "workflows"
    paths = engine.Paths(store=store, private=private, workflows=lambda _: workflows)
    debugging = read_debugging(os.environ.get(VARIABLE, ""), private)
    return engine.Engine(paths=paths, settings=settings, hooks=hooks, debugging=debugging)


def graph_files(store: Path) -> dict[str, int]:
    """Graph files of a store and their bytes, from the disk and not from the engine."""
    return {path.name: path.stat().st_size for path in store.glob("*.safetensors")}


def build_seconds(store: Path) -> dict[str, dict[str, float]]:
    """Seconds that each graph of a store took to build, by its label: all, and each part's."""
    from warmgraph_backends.storing.graph_file import read_header

    found = {}
    for name in graph_files(store):
        manifest = read_header(store / name).read()
        found[manifest.kind] = {"all": manifest.build_seconds, **manifest.facts.phases}
    return found


def settle(engine: Any, model: Any, *, limit_s: float) -> float:
    """Wait until nothing of this model is being built or loaded; returns the seconds that took.

    Raises:
        TimeoutError: after `limit_s`, naming what is unfinished.
    """
    begin = time.perf_counter()
    while True:
        report = engine.report(model)
        unfinished = [k["kind"] for k in report["kinds"] if k["state"] in ("building", "loading")]
        building = report["building"]
        if not unfinished and building["done"] >= building["total"]:
            return time.perf_counter() - begin
        if time.perf_counter() - begin > limit_s:
            raise TimeoutError(f"builds must end within {limit_s:.0f} s, unfinished: {unfinished}")
        time.sleep(POLL_S)


def settle_second_graphs(engine: Any, model: Any, *, limit_s: float) -> None:
    """Wait until no graph for calls that first ones cannot serve is on its way.

    Raises:
        TimeoutError: after `limit_s`.
    """
    scope = engine._objects.carried(model).scope
    begin = time.perf_counter()
    while any(graph.is_pending for graph in scope.second_graphs):
        if time.perf_counter() - begin > limit_s:
            raise TimeoutError(f"second graphs must be there within {limit_s:.0f} s")
        time.sleep(POLL_S)


def brief(report: dict[str, Any]) -> dict[str, Any]:
    """The parts of a report that a benchmark keeps."""
    keys = ("regions", "eager", "builds", "loads", "calls", "misses", "disk_bytes", "notes")
    kept = {key: report.get(key) for key in keys}
    kept["not_ready"] = [k for k in report.get("kinds", []) if k.get("state") != "ready"]
    return kept
