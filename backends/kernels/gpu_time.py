"""Times interchangeable calls on the GPU, whatever else it and the processor are doing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..torch_api.cuda_queue import pause

logger = logging.getLogger(__name__)

#: Some 2 ms, in which the processor queues the calls.
_PAUSE_CYCLES = 4_000_000


def by_turns(
    runs: Mapping[str, Callable[[], Any]], *, are_short: bool = False, rounds: int = 5
) -> dict[str, float]:
    """Return the milliseconds of calls amid this thread's other work, the least of a few each; a
    call that this GPU refuses has none.

    Args:
        are_short: whether the processor's part may be as long as the GPU's; then they are queued
            after a pause.
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
