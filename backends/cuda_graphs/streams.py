"""The streams that calls are captured on.

A library may keep memory for each stream it is called on. Most allocate it once, and all captured
calls share a stream on which they have. Some allocate more for a larger call and free the old
memory (`formats.Format.takes_memory_by_stream`), where a captured call would still write. So such a
call has its own stream: it runs there once before it is captured, and nothing else does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import driver
from .capture_gate import CAPTURE_GATE


@dataclass(eq=False)
class OwnStream:
    """A stream that nobody else has, and the memory that libraries hold for it, as long as the
    process lives.
    """

    stream: Any
    held_bytes: int = 0


class OwnStreams:
    """Streams that serve one captured call at a time, used again once that call is gone."""

    def __init__(self, make: Callable[[torch.device], Any] = driver.make_stream) -> None:
        """Set up; there are no streams yet.

        Args:
            make: makes a stream that nobody else has.
        """
        self._make = make
        self._lock = threading.Lock()
        self._idle: dict[int, list[OwnStream]] = {}

    def take(self, device: torch.device) -> OwnStream:
        """Return a stream of the device on which no captured call lies.

        Raises:
            RuntimeError: the driver makes none.
        """
        with self._lock:
            idle = self._idle.setdefault(device.index or 0, [])
            if idle:
                return idle.pop()
        return OwnStream(self._make(device))

    def give_back(self, device: torch.device, own: OwnStream) -> None:
        """The call that lay on a stream is gone; the next one finds what libraries hold for it."""
        with self._lock:
            self._idle[device.index or 0].append(own)


OWN = OwnStreams()
_shared: dict[int, torch.cuda.Stream] = {}


def shared(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all calls that need no stream of their own, ready to capture on."""
    stream = _shared.get(device.index or 0)
    if stream is None:  # two threads may make one each: one of them serves both
        made = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = _shared.setdefault(device.index or 0, made)
    make_workspaces(stream, device)
    return stream


def rehearse(own: OwnStream, device: torch.device, run: Callable[[], Any]) -> None:
    """Run what is to be captured on a stream of its own; what it gives is dropped."""
    torch.cuda.synchronize(device)  # what it reads was made on another stream
    before = _held(device)
    make_workspaces(own.stream, device)
    with torch.cuda.stream(own.stream):
        run()
    own.stream.synchronize()
    if (
        not driver.is_driver_allocator()
    ):  # PyTorch's own allocator keeps freed memory for that stream only
        with CAPTURE_GATE.loud():
            torch.cuda.empty_cache()
    own.held_bytes += max(0, _held(device) - before)


def make_workspaces(stream: Any, device: torch.device) -> None:
    """Have PyTorch's libraries make their workspaces for a stream.

    Made within a capture, they would be part of that graph's memory and freed with it. They belong
    to a thread as well as to a stream, and may be freed with another graph (`memory`), so this is
    done each time.
    """
    with torch.cuda.stream(stream):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            square = torch.zeros(64, 64, device=device, dtype=dtype)
            torch.nn.functional.linear(square, square, square[0])
            square @ square
    stream.synchronize()


def _held(device: torch.device) -> int:
    """The device memory in use by anyone, without what PyTorch only caches."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return total - free - kept
