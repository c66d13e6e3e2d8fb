"""A worker process: started by the builder as a plain script, builds graphs, and learns how models
call their blocks, until the builder ends it.

Runs outside the host's process, so it makes this pack's `backends` importable under its own name,
and never puts the pack on `sys.path`, where its modules would shadow others.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

PACKAGE = "warmgraph_backends"
HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent


def adopt_package() -> None:
    """Make the folder above this script's importable as the package `warmgraph_backends`."""
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != HERE]
    if PACKAGE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        PACKAGE, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the package in {FOLDER}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


def main() -> None:
    """Serve jobs; torch and the host are imported only after the hello message."""
    adopt_package()
    loop = importlib.import_module(f"{PACKAGE}.worker.loop")

    def prepare(hello: dict[str, Any]) -> None:
        importlib.import_module(f"{PACKAGE}.worker.build").prepare(hello)

    def run(task: dict[str, Any], *, measure: Any) -> tuple[bytes, dict[str, Any]]:
        job = "learn" if "watched" in task else "build"
        output: tuple[bytes, dict[str, Any]] = importlib.import_module(
            f"{PACKAGE}.worker.{job}"
        ).run(task, measure=measure)
        return output

    loop.serve(prepare, run)


if __name__ == "__main__":
    main()
