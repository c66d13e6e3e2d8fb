"""Workers start as needed, measure in turn, and never outlive their builder or its server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from warmgraph_backends.building import worker_thread
from warmgraph_backends.building.builder import Builder
from warmgraph_backends.building.contract import BuildResult

from ..workers import lives, wait_until, worker_pids
from .jobs import error_of, job, result_of, starts, warm_up

ROOT = Path(__file__).resolve().parents[3]
SERVER = Path(__file__).resolve().parents[1] / "builder_server.py"
posix = pytest.mark.skipif(sys.platform == "win32", reason="looks at POSIX processes")


def number_measuring(builder: Builder) -> int:
    """How many workers measure now."""
    gate = builder._gate
    return gate._measuring


def waiting_to_measure(builder: Builder) -> int:
    gate = builder._gate
    return len(gate._waiting)


def test_workers_start_as_needed_up_to_the_number_and_are_used_again(make, tmp_path):
    builder = make(workers=2)
    assert worker_pids(builder) == [] and starts(tmp_path) == 0
    first = result_of(builder.submit(job("sleep"))).facts["pid"]
    assert starts(tmp_path) == 1
    end = tmp_path / "end"
    futures = [builder.submit(job("wait", until=str(end))) for _ in range(8)]
    assert wait_until(lambda: sum(future.running() for future in futures) == 2)
    time.sleep(0.2)
    end.touch()
    pids = {result_of(future).facts["pid"] for future in futures}
    assert len(pids) == 2 and first in pids
    assert starts(tmp_path) == 2


def test_workers_start_one_after_the_other(make, monkeypatch, tmp_path):
    moments: list[float] = []
    start = worker_thread.WorkerThread.start

    def noted_start(thread: worker_thread.WorkerThread) -> None:
        moments.append(builder._next_start)  # set as this one was allowed; a thread may stall
        start(thread)

    monkeypatch.setattr(worker_thread.WorkerThread, "start", noted_start)
    builder, end = make(workers=4), tmp_path / "end"
    futures = []
    for _ in range(4):
        futures.append(builder.submit(job("wait", until=str(end))))
        time.sleep(0.002)  # each submit wakes the supervisor
    assert wait_until(lambda: all(future.running() for future in futures))
    end.touch()
    for future in futures:
        result_of(future)
    assert len(moments) == 4
    assert all(later - earlier >= 0.03 * 0.9 for earlier, later in pairwise(moments))


def test_few_workers_start_while_a_prompt_runs_and_the_others_after_it(make, tmp_path):
    prompt = threading.Event()
    prompt.set()
    builder = make(workers=4, is_busy=prompt.is_set)
    end = tmp_path / "end"
    futures = [builder.submit(job("wait", until=str(end))) for _ in range(8)]
    assert wait_until(futures[0].running)
    time.sleep(0.6)
    assert starts(tmp_path) == 1
    prompt.clear()
    assert wait_until(lambda: starts(tmp_path) > 1)
    end.touch()
    for future in futures:
        result_of(future)


def test_idle_workers_go_and_come_back_on_demand(make, temp, tmp_path):
    builder = make(idle_s=0.2)
    pid = result_of(builder.submit(job("sleep"))).facts["pid"]
    assert wait_until(lambda: worker_pids(builder) == [] and not list(temp.iterdir()))
    assert sys.platform == "win32" or not lives(pid)
    assert result_of(builder.submit(job("sleep"))).facts["pid"] != pid


def test_the_number_of_workers_is_asked_when_none_lives(make, tmp_path):
    answers = iter([1, 3])
    asked: list[str] = []

    def workers() -> int:
        asked.append(threading.current_thread().name)
        return next(answers)

    def is_asleep() -> bool:
        with builder._news:  # a supervisor that has just looked would not ask
            news = builder._news
            return not builder._changed and len(news._waiters) == 1

    builder, ends = make(idle_s=0.3), [tmp_path / "end 1", tmp_path / "end 2"]
    builder._workers = workers
    futures = [builder.submit(job("wait", until=str(ends[0]))) for _ in range(4)]
    assert wait_until(futures[0].running)
    (thread,) = builder._threads
    ends[0].touch()
    for future in futures:
        result_of(future)
    assert len(asked) == 1 and starts(tmp_path) == 1
    thread.join(60.0)
    assert worker_pids(builder) == [] and wait_until(is_asleep)
    futures = [builder.submit(job("wait", until=str(ends[1]))) for _ in range(3)]
    assert wait_until(lambda: all(future.running() for future in futures))
    ends[1].touch()
    for future in futures:
        result_of(future)
    assert len(asked) == 2
    assert starts(tmp_path) == 4


def _overlaps(results: list[BuildResult]) -> int:
    spans = sorted(tuple(span) for result in results for span in result.facts["spans"])
    return sum(later[0] < earlier[1] for earlier, later in pairwise(spans))


def test_one_worker_at_a_time_measures_while_a_prompt_samples(make, tmp_path):
    prompt = threading.Event()
    builder = make(workers=3, is_busy=prompt.is_set)
    warm_up(builder, 3, tmp_path)
    prompt.set()
    futures = [builder.submit(job("take_times", times=4, seconds=0.1)) for _ in range(3)]
    assert _overlaps([result_of(future) for future in futures]) == 0


def test_all_workers_may_measure_while_no_prompt_samples(make, tmp_path):
    builder, end = make(workers=3), tmp_path / "end"
    futures = [builder.submit(job("wait", until=str(end), measuring=True)) for _ in range(3)]
    assert wait_until(lambda: number_measuring(builder) == 3)
    end.touch()
    for future in futures:
        result_of(future)
    assert number_measuring(builder) == 0


def test_waiting_to_measure_costs_no_build_time(make, tmp_path):
    prompt = threading.Event()
    builder = make(is_busy=prompt.is_set)
    warm_up(builder, 1, tmp_path)
    prompt.set()
    assert builder._gate.acquire(lambda: False)
    began = time.monotonic()
    future = builder.submit(job("take_times", times=1, seconds=0.0))
    assert wait_until(lambda: waiting_to_measure(builder) == 1)
    asked = time.monotonic()
    for thread in list(builder._threads):
        thread.expire(time.monotonic() + 3600)
    time.sleep(0.5)
    waited = time.monotonic() - asked
    builder._gate.release()
    result = result_of(future)
    assert result.seconds <= time.monotonic() - began - waited + 0.001  # it is rounded


def test_a_worker_that_hangs_while_it_measures_is_stopped_and_lets_the_next_one(make, tmp_path):
    prompt = threading.Event()
    builder = make(workers=2, is_busy=prompt.is_set)
    warm_up(builder, 2, tmp_path)
    prompt.set()
    hanging = builder.submit(job("take_times", times=1, seconds=600))
    assert wait_until(lambda: number_measuring(builder) == 1)
    threads = list(builder._threads)
    assert wait_until(lambda: any(thread._deadline is not None for thread in threads))
    (measuring,) = [thread for thread in threads if thread._deadline is not None]
    good = builder.submit(job("take_times", times=1, seconds=0.01))
    assert wait_until(lambda: waiting_to_measure(builder) == 1)
    measuring.expire(time.monotonic() + 3600)
    assert "longer than 60 s" in error_of(hanging).reason
    result_of(good)


def test_a_worker_that_dies_while_it_measures_lets_the_next_one(make):
    builder = make(workers=2, is_busy=lambda: True)
    dead = builder.submit(job("die_measuring", cost=9))
    good = builder.submit(job("take_times", times=1, seconds=0.01))
    error_of(dead)
    result_of(good)


@posix
def test_close_while_jobs_run_ends_them_all_and_leaves_nothing(make, tmp_path, temp):
    builder = make(workers=2)
    file = tmp_path / "pids"
    futures = [builder.submit(job("start_compiler", cost=9, pid_file=str(file)))]
    futures += [builder.submit(job("sleep", seconds=600)) for _ in range(4)]
    assert wait_until(file.exists)
    assert wait_until(lambda: len(worker_pids(builder)) == 2)
    worker, compiler, _ = file.read_text().split()
    pids = [*worker_pids(builder), int(compiler)]
    assert int(worker) in pids and all(lives(pid) for pid in pids)
    start = time.monotonic()
    builder.close()
    waited = time.monotonic() - start
    assert not (worker_pids(builder) or list(temp.iterdir())) or waited >= 4.9
    for future in futures:
        assert "closed" in error_of(future).reason
    assert wait_until(lambda: not any(lives(pid) for pid in pids))
    assert wait_until(lambda: worker_pids(builder) == [] and list(temp.iterdir()) == [])
    assert "closed" in error_of(builder.submit(job("sleep"))).reason
    builder.close()


@posix
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT", None])
def test_no_worker_outlives_its_server(tmp_path, how):
    """A server that is killed, told to stop, interrupted, or ends with its jobs unfinished."""
    pid_file, temp = tmp_path / "pids", tmp_path / "temp"
    temp.mkdir()
    environment = {**os.environ, "TMPDIR": str(temp)}
    server = subprocess.Popen(
        [sys.executable, SERVER, tmp_path, pid_file, "start_compiler", *["end"] * (how is None)],
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert wait_until(pid_file.exists)
        worker, compiler, cache = pid_file.read_text().split()
        if how is not None:
            os.killpg(server.pid, getattr(signal, how))  # the whole group, as a terminal's Ctrl+C
        server.wait(60)
        assert wait_until(lambda: not lives(int(worker)) and not lives(int(compiler)))
        assert wait_until(lambda: not Path(cache).exists())
        time.sleep(0.5)
        assert not Path(cache).exists()
        assert wait_until(lambda: list(temp.iterdir()) == [])
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(sys.platform != "win32", reason="all of it is shown above")
def test_no_worker_outlives_a_server_that_is_killed_under_windows(tmp_path):
    """A later start removes the folders: nothing runs in them any more."""
    pid_file = tmp_path / "pids"
    server = subprocess.Popen([sys.executable, SERVER, tmp_path, pid_file, "start_compiler"])
    try:
        assert wait_until(pid_file.exists)
        worker, compiler, _ = pid_file.read_text().split()
    finally:
        server.kill()
        server.wait()
    assert wait_until(lambda: not lives(int(worker)) and not lives(int(compiler)))


@posix
def test_a_fork_of_the_server_that_lives_on_does_not_keep_workers(tmp_path):
    """A fork holds the server's end of the pipe open: the worker must look at its parent too."""
    pid_file = tmp_path / "pids"
    server = subprocess.Popen(
        [sys.executable, SERVER, tmp_path, pid_file, "start_compiler", "fork"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert server.stdout is not None
    fork = 0
    try:
        fork = int(server.stdout.readline())
        worker, compiler, _ = pid_file.read_text().split()
        server.kill()
        server.wait()
        assert lives(fork)
        assert wait_until(lambda: not lives(int(worker)) and not lives(int(compiler)))
    finally:
        server.kill()
        server.wait()
        if fork:
            os.kill(fork, signal.SIGKILL)
        server.stdout.close()


def test_workers_run_at_low_priority_with_caches_and_paths_of_their_own(make, tmp_path, temp):
    builder = make(workers=2, hello={"cwd": str(tmp_path), "argv": ["main.py"], "threads": 3})
    end = tmp_path / "end"
    futures = [builder.submit(job("wait", until=str(end))) for _ in range(2)]
    assert wait_until(lambda: all(future.running() for future in futures))
    end.touch()
    assert len({result_of(future).facts["cache"] for future in futures}) == 2
    facts = result_of(builder.submit(job("describe_process"))).facts
    cache = Path(facts["cache"])
    assert cache.parent == temp and (cache / "kernel.so").exists()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR"):
        assert cache in Path(facts["environment"][name]).parents
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    assert facts["niceness"] >= 19
    assert facts["collects_garbage"] is False, "while a job runs"
    assert facts["hello"]["argv"] == ["main.py"]
    assert Path(facts["cwd"]) == tmp_path
    assert str(ROOT / "backends") not in facts["path"] and str(ROOT) not in facts["path"]
    builder.close()
    assert wait_until(lambda: list(temp.iterdir()) == [])


def test_a_worker_writes_utf8_whatever_the_system_says(make, monkeypatch):
    """An isolated Python hears of no variable: on Windows it would write the system's code page."""
    monkeypatch.setenv("LC_ALL", "C.UTF-8")  # else this Python takes UTF-8 by itself
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    facts = result_of(make().submit(job("describe_process"))).facts
    assert facts["utf8"] == 1
