"""In a long step the processor is never far ahead of the GPU. A list stands for the GPU's queue."""

from __future__ import annotations

import pytest
import torch

from warmgraph_backends.runtime import lookahead
from warmgraph_backends.runtime.lookahead import AHEAD, AHEAD_S, LONG_S, Lookahead

DEVICE = torch.device("cpu")


class Queue:
    """Notes how many marks wait in it, and a clock that goes on while one is waited for."""

    def __init__(self, place_s: float) -> None:
        self.now, self.waiting, self.furthest, self.waits = 0.0, 0, 0, 0
        self._place_s = place_s

    def mark(self, device: torch.device) -> str:
        self.waiting += 1
        self.furthest = max(self.furthest, self.waiting)
        return "a mark"

    def wait_for(self, mark: str) -> None:
        self.waiting -= 1
        self.waits += 1
        self.now += self._place_s


def _step(
    ahead: Lookahead, queue: Queue, places: int = 10, size: int = 100, sort: str = "latent"
) -> None:
    ahead.begin_step(size, sort)
    queue.waiting = queue.waits = queue.furthest = 0
    for _ in range(places):
        ahead.wait(DEVICE)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Queue:
    made = Queue(request.param)
    monkeypatch.setattr(lookahead, "gpu", made)
    monkeypatch.setattr(lookahead.time, "perf_counter", lambda: made.now)
    return made


@pytest.mark.parametrize(
    ("queue", "places"), [(0.3, 0), (AHEAD_S / 1.5, 1), (AHEAD_S / 2.5, AHEAD)], indirect=["queue"]
)
def test_a_long_step_is_queued_as_far_as_the_gpu_computes_in_a_moment(
    queue: Queue, places: int
) -> None:
    ahead = Lookahead()
    ahead.begin_run()
    _step(ahead, queue)
    assert queue.waits == 10 - 1, "the first step tells"
    for _ in range(3):
        _step(ahead, queue)
        assert queue.waiting == places and queue.waits == 10 - places


@pytest.mark.parametrize("queue", [LONG_S / 100], indirect=True)
def test_a_short_step_is_queued_as_a_whole_once_it_is_known(queue: Queue) -> None:
    ahead = Lookahead()
    ahead.begin_run()
    _step(ahead, queue)
    assert queue.waits > 0, "the first step tells"
    for _ in range(2):
        _step(ahead, queue)
        assert queue.waits == queue.furthest == 0
    ahead.end_run()
    ahead.begin_run()
    _step(ahead, queue, size=100)
    assert queue.waits == 0
    _step(ahead, queue, size=101)
    assert queue.waits > 0, "a larger one may be a long one"
    _step(ahead, queue, size=50, sort="image")
    assert queue.waits > 0, "so may one of another sort"


@pytest.mark.parametrize("queue", [LONG_S / 100], indirect=True)
def test_a_run_of_one_step_tells_the_next_run(queue: Queue) -> None:
    """As each call of a VAE is one."""
    ahead = Lookahead()
    waits = []
    for _ in range(3):
        ahead.begin_run()
        _step(ahead, queue)
        waits.append(queue.waits)
        ahead.end_run()
    assert waits == [9, 0, 0]
