"""What holds still while something is captured, in however many threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from warmgraph_backends.cuda_graphs.capture_gate import CaptureGate

MOMENT_S = 0.1


def _begun(run: Callable[[], None]) -> tuple[threading.Thread, threading.Event]:
    """A thread that runs this, and whether it is through."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: (run(), done.set()), daemon=True)
    thread.start()
    return thread, done


def test_nothing_is_collected_until_the_last_of_two_captures_has_ended() -> None:
    quiet, inner = CaptureGate(), threading.Barrier(2)
    seen = []

    def capture(first: bool) -> None:
        with quiet.capture():
            inner.wait(10)
            if first:
                inner.wait(10)
        if not first:
            seen.append(gc.isenabled())  # the other one goes on
            inner.wait(10)

    assert gc.isenabled()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(capture, (True, False)))
    assert seen == [False] and gc.isenabled()


def test_it_stays_as_it_was_where_somebody_else_had_switched_it_off() -> None:
    quiet = CaptureGate()
    gc.disable()
    try:
        with quiet.capture():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="theirs"), quiet.capture():
        raise ValueError("theirs")
    assert gc.isenabled()


def test_what_is_loud_waits_for_captures_and_captures_for_it() -> None:
    quiet, order = CaptureGate(), []

    def loud() -> None:
        with quiet.loud():
            order.append("loud")

    with quiet.capture():
        _, done = _begun(loud)
        assert not done.wait(MOMENT_S) and order == []
    assert done.wait(10)

    def capture() -> None:
        with quiet.capture():
            order.append("capture")

    with quiet.loud():
        _, done = _begun(capture)
        assert not done.wait(MOMENT_S)
    assert done.wait(10) and order == ["loud", "capture"]


def test_who_must_be_alone_waits_for_others_evaluations_and_holds_new_ones_up() -> None:
    quiet, order, end = CaptureGate(), [], threading.Event()

    def other() -> None:
        with quiet.evaluation():
            end.wait(10)
            order.append("other")

    def alone() -> None:
        with quiet.evaluation(), quiet.capture(alone=True):
            order.append("alone")
            _, held = _begun(late)
            assert not held.wait(MOMENT_S)
            order.append("still alone")

    def late() -> None:
        with quiet.evaluation():
            order.append("late")

    _, others = _begun(other)
    while not quiet._busy:
        pass
    _, done = _begun(alone)
    assert not done.wait(MOMENT_S) and order == []
    end.set()
    assert others.wait(10) and done.wait(10)
    while len(order) < 4:
        pass
    assert order == ["other", "alone", "still alone", "late"]


def test_two_that_must_be_alone_within_their_steps_take_turns() -> None:
    quiet, both, now = CaptureGate(), threading.Barrier(2), []
    most = []

    def step(_: int) -> None:
        with quiet.evaluation():
            both.wait(10)
            for _ in range(20):
                with quiet.capture(alone=True):
                    now.append(1)
                    most.append(len(now))
                    now.pop()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(step, range(2), timeout=60))
    assert len(most) == 40 and max(most) == 1 and not quiet._busy and not quiet._waiting
    assert gc.isenabled()


def test_one_thread_by_itself_waits_for_nobody() -> None:
    quiet = CaptureGate()
    with quiet.evaluation(), quiet.evaluation(), quiet.capture(alone=True):
        with quiet.capture(alone=True):
            pass
        assert not gc.isenabled()
    with quiet.loud():
        pass
