"""What clears up behind a server, however it ended and whatever its workers do (Linux)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from warmgraph_backends.building import worker_process as processes
from warmgraph_backends.building.builder import Builder
from warmgraph_backends.building.contract import Job
from warmgraph_backends.cleanup import keeper, temporary

from .workers import lives, wait_until, worker_pids

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "builder_worker.py"
PATIENCE_S = 180.0
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is /proc")


def keepers(temp: Path) -> list[int]:
    """The keepers that clear up a folder of temporary ones."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(temp) in arguments and any(b"keeper.py" in word for word in arguments):
            found.append(int(folder.name))
    return found


def keeper_of(temp: Path) -> int:
    """Wait for the one keeper; a program that has just begun has no arguments yet."""
    assert wait_until(lambda: len(keepers(temp)) == 1)
    return keepers(temp)[0]


class Held(NamedTuple):
    """A server whose worker lets no thread run, with a compiler in a session of its own."""

    server: subprocess.Popen[str]
    worker: int
    compiler: int
    temp: Path
    spool: Path

    def is_gone(self) -> bool:
        return (
            not lives(self.worker)
            and not lives(self.compiler)
            and not list(self.temp.iterdir())
            and not keepers(self.temp)
        )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Held]]:
    started: list[Held] = []

    def start_server(*how: str) -> Held:
        temp, pid_file = tmp_path / "temp", tmp_path / "pids"
        temp.mkdir()
        server = subprocess.Popen(
            [
                *(sys.executable, HERE / "builder_server.py"),
                *(tmp_path, pid_file, "hold_the_interpreter", *how),
            ],
            env={**os.environ, "TMPDIR": str(temp)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert wait_until(pid_file.exists)
        worker, compiler, _ = pid_file.read_text().split()
        held = Held(server, int(worker), int(compiler), temp, tmp_path / "spool")
        started.append(held)
        return held

    yield start_server
    for held in started:
        held.server.kill()
        held.server.communicate()
        for pid in (held.worker, held.compiler):
            if lives(pid):
                os.kill(pid, signal.SIGKILL)


def test_nothing_outlives_a_killed_server_whatever_its_worker_does(start) -> None:
    held = start()
    assert lives(held.worker) and lives(held.compiler) and keeper_of(held.temp)
    assert list(held.temp.iterdir())
    os.killpg(held.server.pid, signal.SIGKILL)
    assert wait_until(held.is_gone), (lives(held.worker), lives(held.compiler))
    time.sleep(0.2)  # nor does anything come back
    assert held.is_gone()


def test_nothing_outlives_a_killed_server_that_a_fork_of_it_outlives(start) -> None:
    """The fork holds all the server's pipes open."""
    held = start("fork")
    assert held.server.stdout is not None
    fork = int(held.server.stdout.readline())
    try:
        held.server.kill()
        held.server.wait()
        assert lives(fork)
        assert wait_until(held.is_gone)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_a_worker_ends_with_its_server_although_the_keeper_is_killed_before(start) -> None:
    """And the next start ends the compiler, and removes what both have left."""
    held = start()
    os.kill(keeper_of(held.temp), signal.SIGKILL)
    held.server.kill()
    assert wait_until(lambda: not lives(held.worker))
    held.server.wait()
    code = (
        f"import sys; sys.argv[1:] = [{str(held.spool)!r}]\n"
        + (HERE / "builder_server.py")
        .read_text()
        .partition("from warmgraph_backends")[0]
        .replace("Path(__file__).resolve().parent", f"Path({str(HERE)!r})")
        + "from warmgraph_backends.building import worker_process as processes\n"
        + "processes.sweep(Path(sys.argv[1]))"
    ).replace("from __future__ import annotations", "")
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(held.temp)}, check=True
    )
    assert wait_until(held.is_gone)


def test_a_server_that_ends_well_leaves_no_keeper(start) -> None:
    held = start("end")
    held.server.wait(60)
    assert wait_until(held.is_gone)


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Builder]]:
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    made: list[Builder] = []

    def make(idle_s: float = 30.0) -> Builder:
        made.append(
            Builder(
                hello={},
                spool=tmp_path / "spool",
                workers=lambda: 1,
                time_limit_s=lambda: 60.0,
                idle_s=idle_s,
                script=SCRIPT,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_compiler_in_a_session_of_its_own_ends_with_a_job_over_its_time(
    builder, tmp_path: Path
) -> None:
    file, built = tmp_path / "pids", builder()
    future = built.submit(
        Job("k", "endless", 1, {"do": "hold_the_interpreter", "pid_file": str(file)})
    )
    assert wait_until(file.exists)
    compiler = int(file.read_text().split()[1])
    assert lives(compiler)
    (thread,) = built._threads
    thread.expire(time.monotonic() + 3600)
    assert "took longer" in str(future.exception(PATIENCE_S))
    assert wait_until(lambda: not lives(compiler))
    assert wait_until(lambda: not list((tmp_path / "temp").iterdir()))


def test_there_is_one_keeper_while_there_are_workers_and_none_after_them(
    builder, tmp_path: Path
) -> None:
    temp = tmp_path / "temp"
    built = builder(idle_s=0.3)
    assert keepers(temp) == []
    for key in "ab":
        end = tmp_path / key
        future = built.submit(Job(key, "held", 1, {"do": "wait", "until": str(end)}))
        assert keeper_of(temp)
        end.touch()
        future.result(PATIENCE_S)
        assert wait_until(lambda: not worker_pids(built) and not keepers(temp))


def test_a_keeper_that_was_killed_is_replaced_with_the_next_worker(tmp_path: Path) -> None:
    kept = processes.Keeper()
    kept.watch(tmp_path / "one")
    first = keeper_of(tmp_path)
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: not lives(first))
    kept.watch(tmp_path / "two")
    second = keeper_of(tmp_path)
    assert second != first
    kept.release(tmp_path / "one")
    assert keepers(tmp_path) == [second]
    kept.release(tmp_path / "two")
    assert keepers(tmp_path) == []


def test_a_keeper_that_cannot_be_started_costs_no_build(builder, monkeypatch, caplog) -> None:
    monkeypatch.setattr(processes, "KEEPER", Path("/nowhere/keeper.py"))
    built = builder()
    for key in "ab":
        built.submit(Job(key, "quick", 1, {"do": "sleep"})).result(PATIENCE_S)


def test_a_keeper_is_small_and_steps_back(tmp_path: Path) -> None:
    kept = processes.Keeper()
    kept.watch(tmp_path / "one")
    try:
        pid = keeper_of(tmp_path)
        stat = Path(f"/proc/{pid}/stat")
        assert wait_until(lambda: stat.read_text().rpartition(")")[2].split()[16] == "19")
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
        assert int(sizes["Private_Dirty"]) < 12 * 1024  # KiB
    finally:
        kept.release(tmp_path / "one")


def test_only_processes_of_these_very_folders_are_ended(tmp_path: Path) -> None:
    folders = [temporary.make("worker") for _ in range(2)]
    texts = (str(folders[0]), str(folders[1]), f"{folders[0]}0")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env={**os.environ, keeper.VARIABLE: text},
            start_new_session=True,
        )
        for text in texts
    ]
    try:
        # One that has just begun has no environment yet.
        assert wait_until(lambda: len(keeper.processes_of(texts)) == len(texts))
        keeper.end_processes_of([folders[0]])
        assert started[0].wait(60) == -signal.SIGKILL
        assert [each.poll() for each in started[1:]] == [None, None]
    finally:
        for each in started:
            each.kill()
            each.wait()
        for folder in folders:
            temporary.remove(folder)
