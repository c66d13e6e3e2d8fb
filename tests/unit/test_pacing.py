"""Number of workers, seconds left, and the gate before the GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from warmgraph_backends.building.pacing import (
    UNMEASURED_S,
    MeasuringGate,
    estimate_fraction,
    estimate_seconds_left,
    worker_count,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "setting", "ram", "vram", "expected"),
    [
        (16, 0, 64 * GIB, 64 * GIB, 8),
        (16, 14, 64 * GIB, 64 * GIB, 14),
        (16, 20, 64 * GIB, 64 * GIB, 14),
        (16, 3, 64 * GIB, 64 * GIB, 3),
        (16, 0, 7 * GIB, 64 * GIB, 3),
        (16, 0, 64 * GIB, 2 * GIB, 4),
        (16, 0, 64 * GIB, None, 8),
        (2, 0, 64 * GIB, None, 2),
        (4, 0, 64 * GIB, None, 3),
        (1, 0, 64 * GIB, None, 1),
        (1, 0, 0, 0, 1),
        (16, 0, 64 * GIB, -GIB, 1),
    ],
)
def test_worker_count_is_the_scarcest_resource_and_at_least_one(
    cores, setting, ram, vram, expected
):
    assert worker_count(cores, setting, ram, vram) == expected


@pytest.mark.parametrize(
    ("measured", "running", "pending", "workers", "expected"),
    [
        ([], [1.0], 5, 2, None),
        ([10.0], [], 0, 4, 0.0),
        ([10.0], [4.0], 0, 8, 6.0),  # one job left: more workers do not help
        ([10.0], [4.0, 2.0], 1, 2, 16.0),
        ([10.0, 2.0, 90.0], [], 4, 4, 10.0),
        ([10.0], [], 5, 2, 30.0),
        ([10.0], [50.0], 0, 1, 5.0),  # over its time: never zero, never negative
    ],
)
def test_seconds_left_follow_from_measured_times(measured, running, pending, workers, expected):
    assert estimate_seconds_left(measured, running, pending, workers) == expected


@pytest.mark.parametrize(
    ("measured", "running", "done", "total", "expected"),
    [
        ([], [], 0, 0, 0.0),
        ([10.0], [], 2, 8, 0.25),
        ([10.0], [5.0], 2, 8, 2.45 / 8),  # half of its time has gone
        ([10.0], [20.0, 5.0], 2, 8, 3.4 / 8),  # over its time: ever slower, and never done
        ([], [UNMEASURED_S / 2], 0, 1, 0.45),
        ([], [1e9], 0, 1, pytest.approx(1.0)),
        ([10.0], [5.0], 8, 8, 1.0),
    ],
)
def test_what_is_being_built_counts_in_part(measured, running, done, total, expected):
    assert estimate_fraction(measured, running, done, total) == pytest.approx(expected)


def test_a_bar_moves_on_as_long_as_a_build_lasts():
    seen = [estimate_fraction([10.0], [seconds / 4], 3, 8) for seconds in range(400)]
    assert seen == sorted(seen) and len(set(seen)) == len(seen) and seen[-1] < 4 / 8


def _wait_until(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def _hold(
    gate: MeasuringGate, order: list[int], number: int, release: threading.Event
) -> threading.Thread:
    def measure() -> None:
        if gate.acquire(lambda: False):
            order.append(number)
            release.wait(60)
            gate.release()

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    return thread


def test_all_may_measure_while_no_prompt_samples():
    gate, order, release = MeasuringGate(lambda: False), [], threading.Event()
    threads = [_hold(gate, order, number, release) for number in range(4)]
    assert _wait_until(lambda: len(order) == 4)
    release.set()
    for thread in threads:
        thread.join(60)


def test_one_may_measure_while_a_prompt_samples_first_come_first_served():
    gate, order = MeasuringGate(lambda: True), []
    releases = [threading.Event() for _ in range(3)]
    threads = [_hold(gate, order, 0, releases[0])]
    assert _wait_until(lambda: order == [0])
    for number in (1, 2):
        threads.append(_hold(gate, order, number, releases[number]))
        assert _wait_until(lambda number=number: len(gate._waiting) == number)
    assert order == [0]
    releases[0].set()
    assert _wait_until(lambda: len(order) > 1)
    time.sleep(0.1)
    assert order == [0, 1]
    for release in releases:
        release.set()
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2]


def test_who_gives_up_does_not_block_those_behind_it():
    gate = MeasuringGate(lambda: True)
    assert gate.acquire(lambda: False)
    gone = threading.Event()
    results: list[bool] = []
    first = threading.Thread(target=lambda: results.append(gate.acquire(gone.is_set)), daemon=True)
    first.start()
    assert _wait_until(lambda: len(gate._waiting) == 1)
    order: list[int] = []
    release = threading.Event()
    second = _hold(gate, order, 2, release)
    assert _wait_until(lambda: len(gate._waiting) == 2)
    gone.set()
    first.join(60)
    assert results == [False]
    gate.release()
    release.set()
    second.join(60)
    assert order == [2]


def test_a_question_that_fails_counts_as_busy(caplog):
    def broken() -> bool:
        raise RuntimeError("no queue")

    gate = MeasuringGate(broken)
    assert gate.acquire(lambda: False)
    tries = iter([False, False, True])
    assert not gate.acquire(lambda: next(tries))
    assert "no queue" in caplog.text
