"""The builder with real worker processes that do other work (`builder_worker.py`)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building import worker_process as processes
from warmgraph_backends.building import worker_thread
from warmgraph_backends.building.builder import Builder, BuildResult, Job, WorkerError
from warmgraph_backends.errors import BuildError, CancelledBuildError
from warmgraph_backends.events import Event, Events
from warmgraph_tools.by_path import ADOPT

from .workers import worker_pids

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "builder_worker.py"
SERVER = HERE / "builder_server.py"
ROOT = HERE.parents[1]
PATIENCE_S = 180.0
posix = pytest.mark.skipif(sys.platform == "win32", reason="looks at POSIX processes")

_numbers = count()


def job(do: str, *, key: str = "", label: str = "", cost: int = 1, **task: Any) -> Job:
    key = key or f"key{next(_numbers)}"
    return Job(key=key, label=label or f"{do} {key}", cost=cost, task={"do": do, **task})


def result_of(future: Future[BuildResult]) -> BuildResult:
    return future.result(PATIENCE_S)


def error_of(future: Future[BuildResult]) -> BuildError:
    error = future.exception(PATIENCE_S)
    assert isinstance(error, BuildError)
    return error


def wait_until(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60.0
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def number_measuring(builder: Builder) -> int:
    """How many workers measure now."""
    gate = builder._gate
    return gate._measuring


def waiting_to_measure(builder: Builder) -> int:
    gate = builder._gate
    return len(gate._waiting)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that workers' caches are made in."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def make(tmp_path: Path, temp: Path) -> Iterator[Callable[..., Builder]]:
    builders: list[Builder] = []

    def make_builder(
        workers: int = 1, limit_s: float = 60.0, hello: Any = None, **more: Any
    ) -> Builder:
        builder = Builder(
            hello={"roll": str(tmp_path / "roll"), **(hello or {})},
            spool=tmp_path / "spool",
            workers=lambda: workers,
            time_limit_s=lambda: limit_s,
            **{"script": SCRIPT, **more},
        )
        builders.append(builder)
        return builder

    yield make_builder
    for builder in builders:
        builder.close()


def warm_up(builder: Builder, workers: int, tmp_path: Path) -> None:
    """Have so many workers ready and idle."""
    end = tmp_path / "warm"
    futures = [builder.submit(job("wait", until=str(end))) for _ in range(workers)]
    assert wait_until(lambda: all(future.running() for future in futures))
    end.touch()
    for future in futures:
        result_of(future)


def starts(tmp_path: Path) -> int:
    roll = tmp_path / "roll"
    return len(roll.read_text().splitlines()) if roll.exists() else 0


def test_a_result_is_the_packed_payload_with_facts_and_seconds(make, tmp_path):
    began = time.monotonic()
    result = result_of(make().submit(job("sleep", key="k", seconds=0.1, payload="graph" * 1000)))
    took = time.monotonic() - began
    assert result.key == "k"
    assert zlib.decompress(result.payload.data) == b"graph" * 1000
    assert result.payload.raw_bytes == 5000
    assert result.payload.sha256 == hashlib.sha256(result.payload.data).hexdigest()
    assert result.facts["pid"] != os.getpid()
    assert 0.1 <= result.seconds <= took + 0.001  # it is rounded
    assert list((tmp_path / "spool").iterdir()) == []


def test_submit_takes_less_than_a_millisecond_whatever_the_workers_do(make):
    builder = make(workers=2)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        builder.submit(job("sleep", seconds=0.01))
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 1e-3


def test_submit_does_not_wait_for_a_process_that_is_slow_to_start(make, monkeypatch):
    go = threading.Event()
    started: list[object] = []

    class SlowProcess(worker_thread.WorkerProcess):
        def __init__(self, *args: Any, **options: Any) -> None:
            go.wait(PATIENCE_S)
            started.append(self)
            super().__init__(*args, **options)

    monkeypatch.setattr(worker_thread, "WorkerProcess", SlowProcess)
    builder = make(workers=4)
    try:
        futures = [builder.submit(job("sleep")) for _ in range(4)]
        assert wait_until(lambda: builder.progress().workers == 4)
        futures.append(builder.submit(job("sleep")))
        assert builder.progress()[:2] == (0, 5) and started == []
    finally:
        go.set()
    for future in futures:
        result_of(future)


def test_no_job_waits_until_what_others_left_is_removed(make, monkeypatch):
    swept = threading.Event()
    monkeypatch.setattr(processes, "sweep", lambda spool: swept.wait(PATIENCE_S))
    try:
        result_of(make().submit(job("sleep")))
        assert not swept.is_set()
    finally:
        swept.set()


def test_a_key_that_waits_or_runs_is_built_once(make, tmp_path):
    builder, end = make(), tmp_path / "end"
    first = builder.submit(job("wait", key="same", until=str(end)))
    waiting = builder.submit(job("sleep", key="other"))
    assert builder.submit(job("sleep", key="same")) is first
    assert builder.submit(job("sleep", key="other")) is waiting
    assert wait_until(first.running)
    assert builder.submit(job("sleep", key="same")) is first
    end.touch()
    result_of(first)
    result_of(waiting)
    assert builder.progress().total == 2


def test_a_failed_key_is_tried_again_when_asked_again(make):
    builder = make()
    failed = builder.submit(job("fail", key="k"))
    error_of(failed)
    again = builder.submit(job("sleep", key="k"))
    assert again is not failed
    assert result_of(again).key == "k"


def test_the_largest_job_is_built_first(make):
    builder = make()
    order: list[int] = []
    builder.pause(True)
    for cost in (3, 9, 1, 5):
        future = builder.submit(job("sleep", cost=cost))
        future.add_done_callback(lambda _, cost=cost: order.append(cost))
    builder.pause(False)
    assert wait_until(lambda: len(order) == 4)
    assert order == [9, 5, 3, 1]


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


def test_a_job_that_raises_fails_alone_with_words_and_the_workers_traceback(make):
    builder = make()
    failed, good = builder.submit(job("fail", cost=2)), builder.submit(job("sleep"))
    error = error_of(failed)
    assert error.reason == "ValueError: the compiler is unhappy"
    assert isinstance(error.__cause__, WorkerError)
    assert "and says more" in str(error.__cause__) and "in fail" in str(error.__cause__)
    result_of(good)


def test_a_worker_is_replaced_after_an_unexpected_error_but_not_after_a_refusal(make):
    builder = make()
    before = result_of(builder.submit(job("sleep"))).facts["pid"]
    refused = error_of(builder.submit(job("refuse")))
    assert (refused.reason, refused.remedy) == ("no Triton here", "install it")
    assert result_of(builder.submit(job("sleep"))).facts["pid"] == before
    error_of(builder.submit(job("fail")))
    assert result_of(builder.submit(job("sleep"))).facts["pid"] != before


def test_a_result_that_is_no_plain_data_fails_its_job_only(make, tmp_path):
    builder = make()
    bad, good = builder.submit(job("unprintable_facts", cost=2)), builder.submit(job("sleep"))
    assert "plain JSON" in error_of(bad).reason
    result_of(good)


def test_a_task_that_is_no_plain_data_fails_its_job_only(make):
    builder = make()
    bad = builder.submit(Job("k", "odd one", 5, {"do": object()}))
    assert "odd one" in error_of(bad).reason
    result_of(builder.submit(job("sleep")))


def test_a_worker_that_dies_costs_its_job_only_and_is_named(make):
    builder = make(workers=2)
    jobs = [job("sleep", seconds=0.1) for _ in range(6)]
    futures = [builder.submit(j) for j in jobs]
    dead = builder.submit(job("die", cost=9, label="ResBlock 320->640"))
    reason = error_of(dead).reason
    assert "ResBlock 320->640" in reason and "exit code 7" in reason
    assert "Fatal Python error: this is the end" in reason
    for future in futures:
        result_of(future)


def test_what_a_dead_worker_wrote_is_removed(make, tmp_path):
    builder = make()
    error_of(builder.submit(job("die_before_the_answer")))
    result_of(builder.submit(job("sleep")))
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_spool_that_cannot_be_written_fails_jobs_in_words(make, tmp_path):
    (tmp_path / "spool").write_text("a file in the way")
    reason = error_of(make().submit(job("sleep"))).reason
    assert "spool" in reason or "NotADirectory" in reason


def test_more_deaths_than_a_start_is_given_cost_one_job_each(make):
    builder = make()
    dying = [builder.submit(job("die", cost=9)) for _ in range(5)]
    good = builder.submit(job("sleep"))
    for future in dying:
        assert "exit code 7" in error_of(future).reason
    result_of(good)


def test_a_job_over_its_time_is_stopped_and_the_rest_goes_on(make, temp):
    builder = make()
    limits = iter([1.0])
    builder._time_limit_s = lambda: next(limits, 60.0)
    slow, good = (
        builder.submit(job("sleep", seconds=600, cost=9, label="huge")),
        builder.submit(job("sleep")),
    )
    assert error_of(slow).reason == 'building "huge" took longer than 1 s and was stopped'
    result_of(good)
    assert (
        len(list(temp.iterdir())) == 1
    )  # the killed worker's cache is gone, its successor's is there


def test_what_compilers_print_and_read_does_not_reach_the_protocol(make):
    builder = make()
    result_of(builder.submit(job("make_noise")))
    result_of(builder.submit(job("sleep")))
    assert len(worker_pids(builder)) == 1


def test_floods_on_stderr_neither_block_nor_grow(make):
    builder = make()
    result_of(builder.submit(job("flood_stderr")))
    assert (
        "last line before the end" in error_of(builder.submit(job("flood_stderr", die=True))).reason
    )


def test_workers_that_only_die_at_their_start_fail_all_jobs_and_are_not_started_forever(
    make, tmp_path
):
    builder = make(hello={"die_at_start": True})
    futures = [builder.submit(job("sleep")) for _ in range(5)]
    for future in futures:
        assert "no such library" in error_of(future).reason
    assert starts(tmp_path) == 3
    time.sleep(0.3)
    assert starts(tmp_path) == 3
    assert builder.progress()[:2] == (5, 5)
    assert "no such library" in error_of(builder.submit(job("sleep"))).reason
    assert starts(tmp_path) == 6
    for _ in range(3):  # and not three more at each prompt
        error = error_of(builder.submit(job("sleep")))
        assert error.final and "no such library" in error.reason
    assert starts(tmp_path) == 6


def test_a_worker_that_starts_well_gives_those_that_died_before_it_their_tries_back(
    make, tmp_path, monkeypatch
):
    builder = make(hello={"die_at_start": True})
    error_of(builder.submit(job("sleep")))
    monkeypatch.setitem(builder._hello, "die_at_start", False)
    result_of(builder.submit(job("sleep")))
    error_of(builder.submit(job("die")))
    monkeypatch.setitem(builder._hello, "die_at_start", True)
    assert wait_until(lambda: worker_pids(builder) == [])
    for _ in range(2):
        assert not error_of(builder.submit(job("sleep"))).final
    assert error_of(builder.submit(job("sleep"))).final
    assert starts(tmp_path) == 3 + 1 + 3 + 3


@pytest.mark.parametrize("workers", [1, 4])
def test_a_job_that_no_other_can_do_better_ends_all_and_nothing_starts_again(
    make, tmp_path, workers
):
    builder = make(workers=workers)
    for future in [builder.submit(job("refuse_for_good")) for _ in range(9)]:
        error = error_of(future)
        assert error.final
        assert (error.reason, error.remedy) == ("nothing compiles here", "update torch")
        assert isinstance(error.__cause__, WorkerError)
    assert wait_until(lambda: all(thread.is_ready for thread in list(builder._threads)))
    started = starts(tmp_path)
    assert started <= workers
    assert error_of(builder.submit(job("sleep"))).final, "also a job that nobody has tried"
    done, total = builder.progress()[:2]
    assert done == total
    time.sleep(0.3)
    assert starts(tmp_path) == started


def test_a_worker_that_says_it_is_unfit_for_good_is_believed_at_once(make, tmp_path):
    builder = make(hello={"unfit_for_good": "this torch has no compiler"})
    for _ in range(2):
        for future in [builder.submit(job("sleep")) for _ in range(3)]:
            error = error_of(future)
            assert error.final and "(this torch has no compiler)" in error.reason
        assert starts(tmp_path) == 1


def test_many_workers_that_die_at_their_start_end_too(make, tmp_path):
    builder = make(workers=6, hello={"unfit": "no module named comfy"})
    for future in [builder.submit(job("sleep")) for _ in range(12)]:
        error = error_of(future)
        assert "no module named comfy" in error.reason
        assert isinstance(error.__cause__, WorkerError)
    assert 3 <= starts(tmp_path) <= 8


def test_a_worker_that_never_gets_ready_is_stopped(make):
    builder = make(hello={"hang_at_start": True}, start_limit_s=0.3)
    assert "not ready after 0.3 s" in error_of(builder.submit(job("sleep"))).reason
    assert wait_until(lambda: worker_pids(builder) == [])


def test_an_interpreter_that_cannot_be_started_fails_in_words(make, tmp_path, monkeypatch):
    builder = make()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    assert "could not be started" in error_of(builder.submit(job("sleep"))).reason


def test_an_idle_worker_that_was_killed_costs_no_job(make):
    builder = make()
    pid = result_of(builder.submit(job("sleep"))).facts["pid"]
    (thread,) = builder._threads
    os.kill(pid, signal.SIGTERM)
    assert wait_until(lambda: not thread._process.alive())
    assert result_of(builder.submit(job("sleep"))).facts["pid"] != pid


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


def test_progress_counts_the_batch_and_estimates_from_measured_times(make, tmp_path):
    builder = make()
    assert builder.progress() == (0, 0, [], None, 0, False, 0.0)
    ends = [tmp_path / f"end {n}" for n in range(4)]
    builder.pause(True)  # or the first may begin before there is a larger one
    futures = [
        builder.submit(job("wait", until=str(end), label=f"kind {n}", cost=9 - n))
        for n, end in enumerate(ends)
    ]
    builder.pause(False)
    assert wait_until(lambda: builder.progress().running == ["kind 0"])
    first = builder.progress()
    assert (first.done, first.total, first.seconds_left) == (0, 4, None)
    time.sleep(0.2)
    assert first.fraction < builder.progress().fraction < 1 / 4
    began = time.monotonic()
    ends[0].touch()
    typical = result_of(futures[0]).seconds
    assert wait_until(lambda: builder.progress().running == ["kind 1"])
    now = builder.progress()
    assert (now.done, now.total) == (1, 4) and 1 / 4 <= now.fraction < 2 / 4
    longest = max(typical, (time.monotonic() - began) / 10)
    assert now.seconds_left is not None
    assert 2 * typical < now.seconds_left <= 2 * typical + longest
    for end in ends:
        end.touch()
    for future in futures:
        result_of(future)
    assert builder.progress()[:4] == (4, 4, [], None) and builder.progress().fraction == 1
    result_of(builder.submit(job("sleep")))
    assert builder.progress()[:2] == (1, 1)


def test_listeners_hear_of_every_stage_and_a_broken_listener_harms_nothing(make, caplog, tmp_path):
    seen: list[tuple[int, int]] = []

    def listen() -> None:
        progress = builder.progress()
        seen.append((progress.done, progress.total))
        raise RuntimeError("listener is broken")

    events = Events()
    events.listen(listen, Event.BUILDS_CHANGED)
    builder, end = make(events=events), tmp_path / "end"
    future = builder.submit(job("wait", until=str(end)))
    assert wait_until(lambda: (0, 1) in seen)
    end.touch()
    result_of(future)
    assert wait_until(lambda: seen[-1] == (1, 1))
    assert "listener is broken" in caplog.text


def test_callbacks_may_call_the_builder(make):
    builder = make()
    got: list[Any] = []

    def again(future: Future[BuildResult]) -> None:
        got.append(builder.progress())
        second = builder.submit(job("sleep"))
        second.add_done_callback(lambda _: builder.close())
        second.add_done_callback(got.append)

    builder.submit(job("sleep")).add_done_callback(again)
    assert wait_until(lambda: len(got) == 2)
    assert got[0][:2] == (1, 1)
    assert worker_pids(builder) == [] or wait_until(lambda: worker_pids(builder) == [])


def test_a_cancelled_job_that_waits_is_dropped_and_one_that_runs_goes_on(make, tmp_path):
    builder, end = make(), tmp_path / "end"
    running = builder.submit(job("wait", until=str(end), cost=9))
    waiting = builder.submit(job("sleep", key="dropped"))
    assert wait_until(running.running)
    assert not running.cancel() and waiting.cancel()
    anew = builder.submit(job("sleep", key="dropped"))
    assert anew is not waiting
    end.touch()
    result_of(running)
    result_of(anew)
    with pytest.raises(CancelledError):
        waiting.result(1)
    assert builder.progress()[:2] == (3, 3)


def test_while_it_is_paused_no_job_begins_and_those_that_run_end(make, tmp_path):
    builder, end = make(workers=2), tmp_path / "end"
    running = builder.submit(job("wait", until=str(end), cost=9))
    assert wait_until(running.running)
    builder.pause(True)
    waiting = [builder.submit(job("sleep")) for _ in range(3)]
    end.touch()
    result_of(running)
    progress = builder.progress()
    assert progress.paused and progress.seconds_left is None
    assert (progress.done, progress.total, progress.running) == (1, 4, [])
    time.sleep(0.5)
    assert not any(future.running() or future.done() for future in waiting)
    builder.pause(False)
    for future in waiting:
        result_of(future)
    assert not builder.progress().paused


def test_a_paused_builder_starts_no_process(make, tmp_path):
    builder = make()
    builder.pause(True)
    future = builder.submit(job("sleep"))
    time.sleep(0.7)
    assert starts(tmp_path) == 0 and builder.progress().workers == 0
    builder.pause(False)
    result_of(future)


def test_cancel_ends_a_pause_and_what_is_asked_for_next_is_built(make):
    """Or a prompt that waits for it would wait for ever: nothing is left that says Resume."""
    builder = make()
    builder.pause(True)
    waiting = builder.submit(job("sleep", key="one"))
    assert builder.cancel() == 1 and waiting.cancelled()
    assert not builder.progress().paused
    result_of(builder.submit(job("sleep", key="one")))


def test_cancelled_builds_end_at_once_and_what_is_asked_after_them_is_built(make, tmp_path, temp):
    builder = make(workers=2)
    jobs = [job("sleep", key=f"job{number}", seconds=600) for number in range(5)]
    futures = [builder.submit(each) for each in jobs]
    assert wait_until(lambda: sum(future.running() for future in futures) == 2)
    assert builder.cancel() == 5
    for future in futures:
        with suppress(CancelledError):
            assert isinstance(future.exception(PATIENCE_S), CancelledBuildError)
    assert sum(future.cancelled() for future in futures) == 3
    assert wait_until(lambda: builder.progress().workers == 0)
    assert builder.progress()[:3] == (5, 5, []) and list(temp.iterdir()) == []
    result_of(builder.submit(job("sleep", key="job0")))
    assert builder.cancel() == 0


def test_a_worker_that_still_starts_is_not_blamed_for_a_cancelled_build(make, tmp_path):
    builder = make()
    for _ in range(6):  # as often as it takes to give up on workers that only die at their start
        builder.submit(job("sleep"))
        time.sleep(0.05)
        builder.cancel()
    result_of(builder.submit(job("sleep")))


@posix
def test_close_while_jobs_run_ends_them_all_and_leaves_nothing(make, tmp_path, temp):
    builder = make(workers=2)
    file = tmp_path / "pids"
    futures = [builder.submit(job("start_compiler", cost=9, pid_file=str(file)))]
    futures += [builder.submit(job("sleep", seconds=600)) for _ in range(4)]
    assert wait_until(lambda: file.exists() and len(file.read_text().split()) == 3)
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
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
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
        assert wait_until(lambda: pid_file.exists() and len(pid_file.read_text().split()) == 3)
        worker, compiler, cache = pid_file.read_text().split()
        if how is not None:
            os.killpg(server.pid, how)  # the whole group, as a terminal's Ctrl+C
        server.wait(60)
        assert wait_until(lambda: not lives(int(worker)) and not lives(int(compiler)))
        assert wait_until(lambda: not Path(cache).exists())
        time.sleep(0.5)
        assert not Path(cache).exists()
        assert wait_until(lambda: list(temp.iterdir()) == [])
    finally:
        server.kill()
        server.wait()


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


def test_the_real_worker_tells_in_words_that_its_host_is_missing(make, tmp_path):
    builder = make(
        script=ROOT / "backends" / "worker" / "main.py",
        hello={
            "argv": ["main.py", "--cpu"],
            "host": str(tmp_path / "nowhere"),
            "cwd": str(tmp_path),
        },
    )
    reason = error_of(builder.submit(Job("k", "a kind", 1, {}))).reason
    assert "build workers cannot start here" in reason, reason


def test_builder_imports_neither_torch_nor_the_host():
    code = f"""{ADOPT}
import json
import warmgraph_backends.building.builder
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("torch", "comfy")]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
