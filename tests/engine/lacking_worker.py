"""The real worker with a torch that lacks a private name: `LACKS` in the environment, as
`module:name`; a file, `ROLL`, gets a line for each process started. `COMPILER`, where it is set, is
the file of one more compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().parents[2] / "backends" / "worker" / "main.py"
LACKS, ROLL = "WARMGRAPH_TEST_LACKS", "WARMGRAPH_TEST_ROLL"
COMPILER = "WARMGRAPH_TEST_MADE_UP_COMPILER"


def main() -> None:
    """Serve as the worker does, once the name is gone."""
    with open(os.environ[ROLL], "a", encoding="utf-8") as roll:
        roll.write(f"{os.getpid()}\n")
    worker = _load("worker_script", WORKER)
    worker.adopt_package()
    loop = importlib.import_module(f"{worker.PACKAGE}.worker.loop")
    as_ever = loop.serve

    def serve(prepare: Any, run: Any) -> None:
        def prepare_without(hello: dict[str, Any]) -> None:
            module, _, name = os.environ[LACKS].partition(":")
            delattr(importlib.import_module(module), name)
            if COMPILER in os.environ:
                _load("made_up_compiler", Path(os.environ[COMPILER])).add()
            prepare(hello)

        as_ever(prepare_without, run)

    loop.serve = serve
    worker.main()


def _load(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".") != Path(__file__).parent]
    main()
