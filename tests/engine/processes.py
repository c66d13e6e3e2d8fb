"""Other processes of these tests: scripts beside this file, which print what they saw as a line of
JSON, the last one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def seen_by(
    script: str, *arguments: object, timeout: float, environment: Mapping[str, str] | None = None
) -> Any:
    """Run a script in a process of its own; returns what it saw."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env=None if environment is None else dict(environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def import_tests() -> None:
    """In such a script: have the fixtures as `conftest`, these tests as `engine_tests`, and with
    them the pack's packages.
    """
    sys.path.insert(0, str(HERE.parents[1] / "dev" / "tools"))
    from by_path import load

    sys.path.pop(0)
    load("conftest", HERE.parent / "conftest.py")
    load("engine_tests", HERE)
