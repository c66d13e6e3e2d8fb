"""The real worker with a torch that lacks a private name: `LACKS` in the environment, as
`module:name`; a file, `ROLL`, gets a line for each process started. `COMPILER`, where it is set, is
the file of one more compiler.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "tools"))
from by_path import load  # noqa: E402

sys.path.pop(0)
LACKS, ROLL = "WARMGRAPH_TEST_LACKS", "WARMGRAPH_TEST_ROLL"
COMPILER = "WARMGRAPH_TEST_MADE_UP_COMPILER"


def main() -> None:
    """Serve as the worker does, once the name is gone."""
    with open(os.environ[ROLL], "a", encoding="utf-8") as roll:
        roll.write(f"{os.getpid()}\n")
    worker = load("worker_script", ROOT / "backends" / "worker" / "main.py")
    worker.adopt_package()
    loop = importlib.import_module(f"{worker.PACKAGE}.worker.loop")
    as_ever = loop.serve

    def serve(prepare: Any, run: Any) -> None:
        def prepare_without(hello: dict[str, Any]) -> None:
            module, _, name = os.environ[LACKS].partition(":")
            delattr(importlib.import_module(module), name)
            if COMPILER in os.environ:
                load("made_up_compiler", Path(os.environ[COMPILER])).add()
            prepare(hello)

        as_ever(prepare_without, run)

    loop.serve = serve
    worker.main()


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".") != Path(__file__).parent]
    main()
