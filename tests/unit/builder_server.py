"""The server's part in tests of workers: builds something that never ends, until it is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "backends" / "worker"))
from main import adopt_package  # noqa: E402

adopt_package()

from warmgraph_backends.building.builder import Builder  # noqa: E402
from warmgraph_backends.building.contract import Job  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
folder, pid_file, do, *how = sys.argv[1:]  # how: "end" early, "fork" before
builder = Builder(
    hello={},
    spool=Path(folder) / "spool",
    workers=lambda: 1,
    time_limit_s=lambda: 600.0,
    script=HERE / "builder_worker.py",
)
builder.submit(Job("k", "endless", 1, {"do": do, "pid_file": pid_file}))
while not Path(pid_file).exists():
    time.sleep(0.02)
if "fork" in how:
    child = os.fork()
    if child == 0:
        time.sleep(120)
        os._exit(0)
    sys.stdout.write(f"{child}\n")
    sys.stdout.flush()
if "end" not in how:
    time.sleep(120)
