"""What must not happen during a capture, on any card and in any thread.

Garbage collection may free GPU memory, and freeing unused memory waits for all GPUs: either ends a
capture, and the process with it. Under `cudaMallocAsync` PyTorch supports one capture at a time,
and counts what other threads allocate meanwhile as part of it; so other cards' steps end first
there, and start no new one.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

#: In seconds: the host's own work of a thread whose evaluation has ended, until it waits.
GRACE_S = 0.02


class CaptureGate:
    """The captures of this process. Several may run at once, each on its card."""

    def __init__(self) -> None:
        """Nothing is captured."""
        self._changed = threading.Condition()
        self._captures: set[int] = set()  # by thread
        self._loud = self._alone = False
        self._was_enabled = False
        #: Evaluations that go on, by thread, and when others ended.
        self._busy: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        #: Threads that wait until they are alone: they allocate nothing meanwhile.
        self._waiting: set[int] = set()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Compute on a card in this thread, once no capture must be alone."""
        me = threading.get_ident()
        with self._changed:
            if me not in self._busy:
                self._changed.wait_for(lambda: not self._alone)
            self._busy[me] = self._busy.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._busy[me] -= 1
                if not self._busy[me]:
                    del self._busy[me]
                    now = time.monotonic()
                    recent = {t: at for t, at in self._ended.items() if now - at < GRACE_S}
                    self._ended = {**recent, me: now}
                    self._changed.notify_all()

    @contextlib.contextmanager
    def capture(self, *, alone: bool = False) -> Iterator[None]:
        """Capture something: until this ends nothing loud begins, and nothing is collected.

        Args:
            alone: whether no other thread may compute meanwhile. Two such captures take turns.
        """
        me = threading.get_ident()
        if me in self._captures:  # within another one
            yield
            return
        with self._changed:
            if alone:
                self._waiting.add(me)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_alone(me))
                self._waiting.discard(me)
                self._alone = True
            else:
                self._changed.wait_for(lambda: not self._loud and not self._alone)
            ended = max((at for t, at in self._ended.items() if t != me), default=0.0)
            if not self._captures:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._captures.add(me)
        try:
            if alone and (left := ended + GRACE_S - time.monotonic()) > 0:
                time.sleep(left)
            yield
        finally:
            with self._changed:
                self._captures.discard(me)
                self._alone = self._alone and not alone
                if not self._captures and self._was_enabled:
                    gc.enable()
                self._changed.notify_all()

    @contextlib.contextmanager
    def loud(self) -> Iterator[None]:
        """Do what would end captures: running ones end first. Not to be called within a capture."""
        with self._changed:
            self._changed.wait_for(lambda: not self._captures and not self._loud)
            self._loud = True
        try:
            yield
        finally:
            with self._changed:
                self._loud = False
                self._changed.notify_all()

    def _is_alone(self, me: int) -> bool:
        if self._loud or self._alone or self._captures:
            return False
        return all(each == me or each in self._waiting for each in self._busy)


#: Of this process: garbage collection is one for all of it.
CAPTURE_GATE = CaptureGate()
