"""Weights that come on streams of their own: beside the work before, and only where there is room.

What comes is compared while it is used: a copy that came too early or memory that was taken too
early would show.
"""

from __future__ import annotations

import pytest
import torch

from warmgraph_backends.torch_api.cuda_queue import pause
from warmgraph_backends.weights.lanes import Lanes

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SIDE = 2048
BYTES = 4 * SIDE * SIDE
LONG = 200_000_000  # cycles: a tenth of a second
ENOUGH, ONE = 10 * BYTES, BYTES


def _turns(lanes: Lanes, sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[bool]]:
    """A sum with each weight, in work that takes long; and of each but the first, whether it had
    come before the work with the one before was done.
    """
    sums, came_ahead = [], []
    done: torch.cuda.Event | None = None
    for source in sources:
        begun = torch.cuda.Event()
        with lanes.turn(source.nbytes) as release:
            weight = source.to(DEVICE, non_blocking=True)
            begun.record()
        if done is not None:
            begun.synchronize()
            came_ahead.append(not done.query())
        pause(LONG)
        sums.append(weight.double().sum())
        done = torch.cuda.Event()
        done.record()
        assert release is not None
        release()
        del weight
    return sums, came_ahead


def _sources() -> list[torch.Tensor]:
    return [torch.full((SIDE, SIDE), float(n)).pin_memory() for n in range(6)]


@pytest.mark.parametrize(("room", "ahead"), [(ENOUGH, True), (ONE, False)], ids=["room", "none"])
def test_weights_come_while_the_work_before_computes_where_there_is_room(
    gpu: None, room: int, ahead: bool
) -> None:
    lanes = Lanes(DEVICE, lambda: room)
    sources = _sources()
    _turns(lanes, sources)  # memory is taken, streams are made
    for _ in range(3):
        lanes.begin_step()
        torch.cuda.synchronize()
        sums, came_ahead = _turns(lanes, sources)
        assert [float(s) for s in sums] == [float(n) * SIDE * SIDE for n in range(6)]
        assert came_ahead == [ahead] * 5


def test_no_more_than_two_are_there_at_a_time(gpu: None) -> None:
    lanes = Lanes(DEVICE, lambda: ENOUGH)
    sources = _sources()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    _turns(lanes, sources)
    torch.cuda.synchronize()
    # A weight is let go of as soon as its work is queued; its sum was taken in float64.
    assert torch.cuda.max_memory_reserved() - before < 2 * BYTES + 2 * BYTES + (64 << 20)


def test_weights_come_in_order_where_they_may_not_come_beside(gpu: None) -> None:
    with Lanes(DEVICE, None).turn(BYTES) as release:
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert release is None
