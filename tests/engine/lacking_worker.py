"""The real worker with a torch that lacks a private name: `LACKS` in the environment, as
`module:name`; a file, `ROLL`, gets a line for each process started.
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


def main() -> None:
    """Serve as the worker does, once the name is gone."""
    with open(os.environ[ROLL], "a", encoding="utf-8") as roll:
        roll.write(f"{os.getpid()}\n")
    spec = importlib.util.spec_from_file_location("worker_script", WORKER)
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.adopt_package()
    loop = importlib.import_module(f"{worker.PACKAGE}.worker.loop")
    as_ever = loop.serve

    def serve(prepare: Any, run: Any) -> None:
        def prepare_without(hello: dict[str, Any]) -> None:
            module, _, name = os.environ[LACKS].partition(":")
            delattr(importlib.import_module(module), name)
            prepare(hello)

        as_ever(prepare_without, run)

    loop.serve = serve
    worker.main()


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".") != Path(__file__).parent]
    main()
