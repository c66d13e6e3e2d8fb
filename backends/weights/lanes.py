"""The streams on which a region's weights are copied while the region before computes.

The host has such streams for single layers. A turn on one of those waits for what was queued before
the last turn, so a region's second layer would come only after the region before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..device.gpu import current_stream, new_stream, on_stream


class Lanes:
    """Two alternating streams, one turn a region; the copies need memory beside the computation."""

    def __init__(self, device: torch.device, room: Callable[[], int] | None) -> None:
        """Set up; there are no streams yet.

        Args:
            device: to which weights are copied.
            room: returns how many bytes they may take at this moment; None: they are copied in
                order with the queued work.
        """
        self._device, self._room = device, room
        self._left: int | None = None
        self._before = 0
        self._streams: list[Any] = []

    def begin_step(self) -> None:
        """Read the available room again."""
        self._left = None

    @contextlib.contextmanager
    def turn(self, size: int) -> Iterator[Callable[[], None] | None]:
        """Run copies of so many bytes beside the queued work; the work that follows waits for them.

        Yields:
            What to call once the work that uses them is queued, if anything. Only then may the
                copies be freed: another turn may use their memory at once.
        """
        if self._room is None:
            yield None
            return
        lane = self._pick(size, self._room)
        queue = current_stream(self._device)
        with on_stream(lane):
            yield partial(lane.wait_stream, queue)
        queue.wait_stream(lane)

    def _pick(self, size: int, room: Callable[[], int]) -> Any:
        """The stream of a turn: that of the turn before, whose memory is then free, if there is no
        room for both.
        """
        if not self._streams:
            self._streams = [new_stream(self._device) for _ in range(2)]
        if self._left is None:
            self._left = room()
        if self._before + size <= self._left:
            self._streams.reverse()
        self._before = size
        return self._streams[0]
