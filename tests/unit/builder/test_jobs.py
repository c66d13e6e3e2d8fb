"""A builder's jobs are built once and in order, are counted, and can be paused and cancelled."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

import pytest

from warmgraph_backends.building import worker_process as processes
from warmgraph_backends.building import worker_thread
from warmgraph_backends.building.contract import BuildResult
from warmgraph_backends.errors import CancelledBuildError
from warmgraph_backends.events import Event, Events
from warmgraph_tools.by_path import ADOPT

from ..workers import wait_until, worker_pids
from .jobs import PATIENCE_S, error_of, job, result_of, starts


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


def test_builder_imports_neither_torch_nor_the_host():
    code = f"""{ADOPT}
import json
import warmgraph_backends.building.builder
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("torch", "comfy")]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
