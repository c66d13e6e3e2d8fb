"""A worker for the builder's tests: the real protocol and the real serving loop, other tasks.

Its hello may hold "unfit" and "unfit_for_good" (fail at the start), "die_at_start", "hang_at_start"
and "roll" (a file that gets a line for each process started). A task is {"do": name, ...}.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.stdout.write("a start-up hook says hello\n\x00")  # before the stream is the protocol's
sys.stdout.flush()

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "backends" / "worker"))
from main import adopt_package  # noqa: E402

adopt_package()

from warmgraph_backends import errors  # noqa: E402
from warmgraph_backends.worker import loop  # noqa: E402

HELLO: dict[str, Any] = {}
SCRIBBLE = """
import os, sys, time
while True:
    os.makedirs(sys.argv[1] + "/sub", exist_ok=True)
    for number in range(9):
        with open(f"{sys.argv[1]}/sub/{sys.argv[2]} {number}", "w") as file:
            file.write("x")
    time.sleep(0.001)
"""
STUBBORN = """
import os, sys, time
while True:
    try:
        os.makedirs(sys.argv[1], exist_ok=True)
        open(sys.argv[1] + "/object", "w").close()
    except OSError:
        pass
    time.sleep(0.002)
"""


def prepare(hello: dict[str, Any]) -> None:
    HELLO.update(hello)
    if "roll" in hello:
        with open(hello["roll"], "a", encoding="utf-8") as roll:
            roll.write(f"{os.getpid()}\n")
    if hello.get("die_at_start"):
        sys.stderr.write("no such library\n")
        sys.stderr.flush()
        os._exit(3)
    if hello.get("hang_at_start"):
        time.sleep(600)
    if hello.get("unfit"):
        raise RuntimeError(hello["unfit"])
    if hello.get("unfit_for_good"):
        raise errors.RequirementError(hello["unfit_for_good"], final=True)


def run(task: dict[str, Any], *, measure: loop.Measure) -> tuple[bytes, dict[str, Any]]:
    began = time.monotonic()
    facts: dict[str, Any] = {"pid": os.getpid(), "cache": HELLO["cache"]}
    facts.update(TASKS[task["do"]](task, measure) or {})
    return task.get("payload", "payload").encode(), {
        **facts,
        "began": began,
        "ended": time.monotonic(),
    }


def tell(task: dict[str, Any], *what: object) -> None:
    """Write words to the file that a test waits for: it is whole as soon as it is there."""
    file = Path(task["pid_file"])
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(" ".join(map(str, what)))
    beside.replace(file)


def sleep(task: dict[str, Any], measure: loop.Measure) -> None:
    time.sleep(task.get("seconds", 0.0))


def wait(task: dict[str, Any], measure: loop.Measure) -> None:
    """End once a test has made a file; measure meanwhile, and say by which process, if told to."""
    if "pid_file" in task:
        tell(task, os.getpid())
    with measure() if task.get("measuring") else contextlib.nullcontext():
        while not os.path.exists(task["until"]):
            time.sleep(0.01)


def fail(task: dict[str, Any], measure: loop.Measure) -> None:
    raise ValueError("the compiler is unhappy\nand says more")


def refuse(task: dict[str, Any], measure: loop.Measure) -> None:
    raise errors.RequirementError("no Triton here", remedy="install it")


def refuse_for_good(task: dict[str, Any], measure: loop.Measure) -> None:
    raise errors.BuildError("nothing compiles here", remedy="update torch", final=True)


def spoil(task: dict[str, Any], measure: loop.Measure) -> None:
    if task["by"] == "card":
        import torch

        raise torch.AcceleratorError("an illegal memory access was encountered")
    raise {
        "worker": errors.BrokenWorkerError("no graph compiles here now"),
        "memory": MemoryError(),
        "exit": SystemExit(3),
    }[task["by"]]


def die(task: dict[str, Any], measure: loop.Measure) -> None:
    os.write(2, b"Fatal Python error: this is the end\nsome frame\n")
    os._exit(task.get("status", 7))


def make_noise(task: dict[str, Any], measure: loop.Measure) -> None:
    sys.stdout.write("printed\n" * 1000)
    sys.stdout.flush()
    os.write(1, b"\x00\x00\x00\x05hello")
    subprocess.run([sys.executable, "-c", "print('from a compiler')"], check=True)
    reader = "import sys; sys.exit(len(sys.stdin.read()))"
    subprocess.run([sys.executable, "-c", reader], check=True)  # must not eat the messages


def flood_stderr(task: dict[str, Any], measure: loop.Measure) -> None:
    for _ in range(64):
        os.write(2, b"x" * (1 << 20))
    os.write(2, b"\nlast line before the end\n")
    if task.get("die"):
        os._exit(7)


def take_times(task: dict[str, Any], measure: loop.Measure) -> dict[str, Any]:
    spans = []
    for _ in range(task["times"]):
        with measure(), measure():
            start = time.monotonic()
            time.sleep(task["seconds"])
            spans.append((start, time.monotonic()))
    return {"spans": spans}


def die_measuring(task: dict[str, Any], measure: loop.Measure) -> None:
    with measure():
        os._exit(7)


def describe_process(task: dict[str, Any], measure: loop.Measure) -> dict[str, Any]:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR", "OMP_NUM_THREADS")
    cache = Path(HELLO["cache"])
    (cache / "kernel.so").write_bytes(b"code")
    return {
        "environment": {name: os.environ.get(name, "") for name in names},
        "niceness": os.nice(0) if sys.platform != "win32" else 19,
        "collects_garbage": gc.isenabled(),
        "hello": HELLO,
        "utf8": sys.flags.utf8_mode,
        "cwd": os.getcwd(),
        "path": sys.path,
    }


def start_compiler(task: dict[str, Any], measure: loop.Measure) -> None:
    child = subprocess.Popen([sys.executable, "-c", SCRIBBLE, HELLO["cache"], "of a compiler"])
    tell(task, os.getpid(), child.pid, HELLO["cache"])
    sys.argv = ["", HELLO["cache"], "of the worker"]
    exec(SCRIBBLE, {})  # noqa: S102


def hold_the_interpreter(task: dict[str, Any], measure: loop.Measure) -> None:
    """No thread of this process runs from here on, and its compiler is in no group of its own."""
    command = [sys.executable, "-c", STUBBORN, HELLO["cache"]]
    child = subprocess.Popen(command, start_new_session=True)
    tell(task, os.getpid(), child.pid, HELLO["cache"])
    ctypes.PyDLL(None).sleep(120)


def unprintable_facts(task: dict[str, Any], measure: loop.Measure) -> dict[str, Any]:
    return {"object": object()}


TASKS = {
    function.__name__: function
    for function in (
        sleep, wait, fail, refuse, refuse_for_good, die, make_noise, flood_stderr, take_times,
        die_measuring, describe_process, start_compiler,
        hold_the_interpreter, unprintable_facts, spoil,
    )
}  # fmt: skip

if __name__ == "__main__":
    loop.serve(prepare, run)
