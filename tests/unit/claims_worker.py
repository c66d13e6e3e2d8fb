"""A worker for the tests of servers that share a store: its graphs are their own labels.

Its hello holds "roll", a file that gets a line for each build; "seconds" that one takes; "fails".
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "backends" / "worker"))
from main import adopt_package

adopt_package()

from warmgraph_backends.worker import loop as serving  # noqa: E402

HELLO: dict[str, Any] = {}


def run(task: dict[str, Any], *, measure: serving.Measure) -> tuple[bytes, dict[str, Any]]:
    label = task["description"]["label"]
    with open(HELLO["roll"], "a", encoding="utf-8") as roll:
        roll.write(f"{label}\n")
    time.sleep(HELLO["seconds"])
    if HELLO.get("fails"):
        raise ValueError("this server cannot build")
    facts = {"weights": [], "work": 1.0, "binary_bytes": 0, "checks": [], "phases": {}}
    return label.encode(), facts


if __name__ == "__main__":
    serving.serve(HELLO.update, run)
