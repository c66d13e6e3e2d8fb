#!/usr/bin/env python3
"""The developer's commands: `demo`, `test`, `bench` and `windows`, on a fresh machine as well.

Each sets up what it needs first: a virtual environment in `.venv`, the pinned torch, the real
ComfyUI in `.host`. Run it with Python 3.10 to 3.13; nothing else has to be installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from tools import durations, kept_graphs, setup
from tools.setup import Setup, SetupError, say

ROOT = Path(__file__).resolve().parents[1]

# Most of a test's time is one thread's, and two fifths of it pass in waiting for servers, pages and
# builds: three processes keep two cores busy. A file is one process's, for what its tests share;
# those that take longest come first.
PARALLEL = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")

# A test of a GPU needs about this much of its memory: the host, a model and what it computes.
GIB_PER_TEST = 20
MOST_BESIDE = 6
BY_TESTS = ("--dist", "load", "--maxschedchunk", "1")

# With another host or torch.
QUICK = " and quick and not slow"

# What pytest ends with where no test was chosen, as in one pass of several with -k.
NONE_CHOSEN = 5

# Images on a CPU are tensors of megabytes, which glibc asks the kernel for and gives back each
# time: clearing those pages takes longer than what is computed on them.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


# Compiled graphs are found again by what is in them, in another clone as well.
KEPT = kept_graphs.folder()

# What looks at the code runs beside the tests; its words come after theirs.
CHECKS = {
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "mypy": ["-m", "mypy", "backends/"],
}


def start(
    ready: Setup, arguments: Sequence[str | Path], output: IO[str] | None = None
) -> subprocess.Popen[str]:
    """Start a Python command in the virtual environment."""
    kept = setup.keeping_bytecode(ROOT / ".venv-bytecode")
    named = {"WARMGRAPH_HOST": str(ready.tree)}
    if KEPT.is_dir():
        named[kept_graphs.VARIABLE] = str(KEPT)
    environment = {**KEEP_MEMORY, **os.environ, **kept, **named}
    command = [str(ready.python), *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=output, text=True
    )


def run(ready: Setup, arguments: Sequence[str | Path]) -> int:
    """Run a Python command in the virtual environment and return its exit status."""
    return start(ready, arguments).wait()


def demo(options: argparse.Namespace) -> int:
    """Show the whole way on a real server: build, swap in, any size, restart."""
    ready = setup.prepare()
    flags = [] if ready.gpu_gib else ["--cpu"]
    return run(ready, ["-m", "dev.tools.demo", "--folder", options.folder, *flags])


def test(options: argparse.Namespace) -> int:
    """Run every check; all of them run even when one fails."""
    ready = setup.prepare(options.host, options.torch)
    if options.gpu and not ready.gpu_gib:
        say("these tests need an NVIDIA GPU, and there is none here")
        return 1
    if options.from_nothing:
        shutil.rmtree(KEPT, ignore_errors=True)
    try:
        KEPT.mkdir(parents=True, exist_ok=True)
        kept_graphs.prune(KEPT)
    except OSError as error:
        say(f"no compiled graphs are kept for later runs: {error}")
    is_pinned = options.host == setup.DEFAULT_HOST and options.torch == setup.DEFAULT_TORCH
    checks = CHECKS if is_pinned and not options.gpu else {}
    failed = []
    with ExitStack() as stack:
        beside = []
        for name, arguments in checks.items():
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            beside.append((name, arguments, start(ready, arguments, output), output))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ended = {}
        for tests in passes(options, ready.gpu_gib, is_pinned=is_pinned):
            say(f"pytest: python {' '.join(tests)}")
            report = folder / f"{len(ended)}.xml"
            chosen = ["-k", options.k] if options.k else []
            ended[report] = run(ready, [*tests, *chosen, "--junitxml", report])
        if not set(ended.values()) <= {0, NONE_CHOSEN} or 0 not in ended.values():
            failed.append("pytest")
        if options.record:
            durations.record(ended)
        for name, arguments, process, output in beside:
            say(f"{name}: python {' '.join(arguments)}")
            if process.wait():
                failed.append(name)
            output.seek(0)
            print(output.read(), end="", flush=True)
    say(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


def passes(options: argparse.Namespace, gpu_gib: int, *, is_pinned: bool) -> Iterator[list[str]]:
    """Yield the arguments of each run of pytest, one after the other: what needs no GPU, what
    shares one, and what needs it to itself.
    """
    pytest, on_gpu = (["-m", "pytest", folder] for folder in ("tests", "tests/gpu"))
    unless_all = "" if options.all else " and not slow"
    if options.frontend:
        browser = ["-m", "pytest", "tests/browser", "--frontend", options.frontend]
        yield [*browser, *PARALLEL, "-m", f"not gpu{unless_all}"]
        return
    if not options.gpu:
        yield [*pytest, *PARALLEL, "-m", f"not gpu{unless_all if is_pinned else QUICK}"]
    if options.gpu or (gpu_gib and is_pinned):
        beside = max(1, min(gpu_gib // GIB_PER_TEST, MOST_BESIDE))
        yield [*on_gpu, "-m", "gpu and not slow", *BY_TESTS, "-n", str(beside)]
        if options.all:
            yield [*on_gpu, "-m", "gpu and slow"]


def bench(_options: argparse.Namespace) -> int:
    """Run the benchmarks, which need a GPU."""
    ready = setup.prepare()
    if not ready.gpu_gib:
        say("the benchmarks need an NVIDIA GPU, and there is none here")
        return 1
    return run(ready, ["-m", "dev.benchmarks"])


def windows(options: argparse.Namespace) -> int:
    """Run parts of the suite by Windows' own Python under Wine."""
    if sys.platform != "linux":
        say("this needs Linux; on Windows itself: python dev test")
        return 1
    home = KEPT.parent / "windows"
    return run(setup.prepare(), ["-m", "dev.tools.windows", "--home", home, *options.rooms])


def main() -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("demo", help="the whole way on a real server, as a table")
    command.add_argument("--folder", type=Path, default=ROOT / ".demo", help="default: .demo")
    command.set_defaults(call=demo)
    command = commands.add_parser("test", help="lint, format, types and tests")
    command.add_argument(
        "--host",
        metavar="VERSION|TREE",
        default=setup.DEFAULT_HOST,
        help=f"the quick half with another ComfyUI: {', '.join(setup.HOSTS)}, or a tree's path",
    )
    command.add_argument(
        "--torch",
        metavar="VERSION",
        default=setup.DEFAULT_TORCH,
        help="the quick half with another torch, in a virtual environment of its own",
    )
    command.add_argument("--all", action="store_true", help="those that build for minutes, too")
    command.add_argument(
        "--frontend",
        metavar="VERSION",
        help="only those of the page, with another comfyui-frontend-package, or the newest",
    )
    command.add_argument("--gpu", action="store_true", help="only those that need an NVIDIA GPU")
    command.add_argument(
        "--from-nothing", action="store_true", help=f"keep no graphs of earlier runs ({KEPT})"
    )
    command.add_argument(
        "--record", action="store_true", help="write tests/durations.json, which decides the order"
    )
    command.add_argument("-k", metavar="EXPRESSION", help="only tests that match, as for pytest")
    command.set_defaults(call=test)
    command = commands.add_parser("bench", help="the benchmarks (GPU)")
    command.set_defaults(call=bench)
    command = commands.add_parser("windows", help="parts of the suite under Wine (Linux)")
    command.add_argument("rooms", nargs="*", metavar="ROOM", help="such as store; default: all")
    command.set_defaults(call=windows)
    options = parser.parse_args()
    try:
        return int(options.call(options))
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
