"""How long the GPU takes for calls that may stand for each other, whatever else it and the
processor are doing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..contract import Measure
from ..torch_api.cuda_queue import pause

logger = logging.getLogger(__name__)

_CALLS = 10
_ROUNDS = 9
#: Some 2 ms, in which the processor queues the calls; where it does not, twice that, and so on.
_PAUSE_CYCLES = 4_000_000
_LONGEST_PAUSE = 128 * _PAUSE_CYCLES


def accepted(runs: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Make each call once, and return those that this GPU does not refuse: whatever a kernel is to
    be compiled or planned for is then there.
    """
    from triton.errors import TritonError

    found: dict[str, Callable[[], Any]] = {}
    for name, run in runs.items():
        with contextlib.suppress(RuntimeError, TritonError), torch.no_grad():
            run()
            found[name] = run
    return found


def compare(runs: Mapping[str, Callable[[], Any]], measure: Measure) -> dict[str, float]:
    """Return the `microseconds` of each call for which they can be told.

    Args:
        measure: held while calls are timed.
    """
    with measure():
        times = {name: microseconds(run) for name, run in runs.items()}
    return {name: time for name, time in times.items() if time is not None}


def by_turns(
    runs: Mapping[str, Callable[[], Any]], *, are_short: bool = False, rounds: int = 5
) -> dict[str, float]:
    """Return the milliseconds of calls in the midst of other work of this thread, the least of a
    few each; a call that this GPU refuses has none.

    Args:
        are_short: whether the processor's part may be as long as the GPU's; they are queued behind
            a pause then.
    """
    event: Any = torch.cuda.Event
    taken: dict[str, Callable[[], Any]] = {}
    for name, run in runs.items():
        try:
            run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.debug("%s was refused: %s", name, error)
        else:
            taken[name] = run
    marks: dict[str, list[Any]] = {name: [] for name in taken}
    if are_short:
        pause(_PAUSE_CYCLES)
    for _ in range(rounds):
        for name, run in taken.items():
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            run()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: min(a.elapsed_time(b) for a, b in pairs) for name, pairs in marks.items()}


def microseconds(run: Callable[[], Any]) -> float | None:
    """Return the GPU's time of a call that nothing disturbs, the first decile of many; None if it
    cannot be told.
    """
    try:
        with torch.no_grad():
            times = _each_call(run)
    except RuntimeError as error:
        logger.info("A kernel was not measured: %s", error)
        return None
    return statistics.quantiles(times, n=10)[0]


def _each_call(run: Callable[[], Any]) -> list[float]:
    """Microseconds of many calls, without the processor's part: they queue up behind a pause.

    Each by itself, for other workers and the images that are being made take turns on the GPU: a
    turn of theirs, some milliseconds, is then added to one call and not to all.

    No CUDA graph: Triton's launcher asks the driver about each pointer, and the driver does not
    know memory that is allocated within a capture.

    Raises:
        RuntimeError: the processor did not queue the calls within the longest pause.
    """
    event: Any = torch.cuda.Event
    times: list[float] = []
    cycles = _PAUSE_CYCLES
    while len(times) < _CALLS * _ROUNDS:
        marks = [event(enable_timing=True) for _ in range(_CALLS + 1)]
        torch.cuda.synchronize()
        pause(cycles)
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        was_late = marks[0].query()
        torch.cuda.synchronize()
        if not was_late:
            times += [a.elapsed_time(b) * 1000.0 for a, b in itertools.pairwise(marks)]
        elif cycles < _LONGEST_PAUSE:
            cycles *= 2
        else:
            raise RuntimeError("the processor is too busy for the GPU's time to be told")
    return times
