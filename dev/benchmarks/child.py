"""Run one task in a fresh process under given host flags; its last line is the result as JSON.

A script, started by `run.py` and by the GPU tests with one argument: a JSON object {"task", "tree",
"base", "argv", "narrow", "pretended", "params"}. What a task reports on the way is printed as lines
{"partial": ...}, so that a killed one is not lost.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ALIAS = "warmgraph_benchmarks"


def main() -> int:
    request = json.loads(sys.argv[1])
    # This folder is on sys.path because this is a script; its names must not hide the host's.
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() not in (HERE, HERE.parents[1])
    ]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    answer: dict[str, Any]
    try:
        answer = {"ok": True, **_run(request)}
    except Exception as error:
        traceback.print_exc()
        answer = {"ok": False, "reason": f"{type(error).__name__}: {error}"[:2000]}
    print(json.dumps(answer), flush=True)
    return 0 if answer["ok"] else 1


def _run(request: dict[str, Any]) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(
        ALIAS, HERE / "__init__.py", submodule_search_locations=[str(HERE)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[ALIAS] = package
    spec.loader.exec_module(package)

    host = importlib.import_module(f"{ALIAS}.host")
    begin = time.perf_counter()
    facts = host.boot(
        Path(request["tree"]),
        request["argv"],
        base=Path(request["base"]),
        narrow=request["narrow"],
        pretended=request["pretended"],
    )
    boot_seconds = time.perf_counter() - begin
    print(json.dumps({"host": facts._asdict()}), flush=True)

    import torch

    tasks = importlib.import_module(f"{ALIAS}.tasks")
    with torch.inference_mode():  # as the host's executor runs every node
        result = tasks.TASKS[request["task"]](**request["params"])
    return {
        "result": result,
        "boot_seconds": round(boot_seconds, 2),
        "task_seconds": round(time.perf_counter() - begin - boot_seconds, 2),
    }


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not every thread of the host and the engine is a daemon
