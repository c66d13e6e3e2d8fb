"""The streams on which weights come that lie elsewhere: a region's while the one before computes.

The host has such streams for single layers. A turn on one of those waits for what was queued before
the last turn, so the second layer of a region would come only once the region before is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..device.gpu import current_stream, new_stream, on_stream


class Lanes:
    """Two streams by turns, one turn a region: what comes takes memory beside what computes."""

    def __init__(self, device: torch.device, room: Callable[[], int] | None) -> None:
        """Set up; there are no streams yet.

        Args:
            device: where weights come to.
            room: tells how many bytes of it they may take at this moment; None where they come in
                order with the work that is queued.
        """
        self._device, self._room = device, room
        self._left: int | None = None
        self._before = 0
        self._streams: list[Any] = []

    def begin_step(self) -> None:
        """Look at the room anew."""
        self._left = None

    @contextlib.contextmanager
    def turn(self, size: int) -> Iterator[Callable[[], None] | None]:
        """Let copies of so many bytes that are begun within come beside the work that is queued;
        the work that follows waits for them.

        Yields:
            What to call once the work that uses them is queued, if anything. The copies may be let
            go of only then: another turn may take their memory at once.
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
        """The stream of a turn: the one of the turn before, whose memory is then free, where there
        is no room for both.
        """
        if not self._streams:
            self._streams = [new_stream(self._device) for _ in range(2)]
        if self._left is None:
            self._left = room()
        if self._before + size <= self._left:
            self._streams.reverse()
        self._before = size
        return self._streams[0]
