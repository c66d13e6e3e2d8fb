"""How long the GPU takes for a call, whatever else it and the processor are doing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from . import torch_private

logger = logging.getLogger(__name__)

_CALLS = 10
_ROUNDS = 9
#: Some 2 ms, in which the processor queues the calls; where it does not, twice that, and so on.
_PAUSE_CYCLES = 4_000_000
_LONGEST_PAUSE = 128 * _PAUSE_CYCLES


def microseconds(run: Callable[[], Any]) -> float | None:
    """Return the GPU's time of a call; None if it cannot be told."""
    try:
        with torch.no_grad():
            return _least(run)
    except RuntimeError as error:
        logger.info("A kernel was not measured: %s", error)
        return None


def _least(run: Callable[[], Any]) -> float:
    """Time of one call, without the processor's part: all calls queue up behind a pause.

    No CUDA graph: Triton's launcher asks the driver about each pointer, and the driver does not
    know memory that is allocated within a capture. The least of several times, for other workers
    and the images that are being made take turns on the GPU, which can only add to them.

    Raises:
        RuntimeError: the processor did not queue the calls within the longest pause.
    """
    event: Any = torch.cuda.Event
    times: list[float] = []
    cycles = _PAUSE_CYCLES
    while len(times) < _ROUNDS:
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        torch_private.pause(cycles)
        begin.record()
        for _ in range(_CALLS):
            run()
        end.record()
        was_late = begin.query()
        torch.cuda.synchronize()
        if not was_late:
            times.append(begin.elapsed_time(end) * 1000.0 / _CALLS)
        elif cycles < _LONGEST_PAUSE:
            cycles *= 2
        else:
            raise RuntimeError("the processor is too busy for the GPU's time to be told")
    return min(times)
