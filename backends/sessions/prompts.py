"""Prompts that run: whether builds must leave room for one, and waiting for graphs within one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ..building.builder import Builder
from ..building.pacing import BuildProgress
from .lines import Line, line
from .words import building_line


class Awaited(Protocol):
    """What a prompt may wait for."""

    @property
    def is_pending(self) -> bool:
        """Whether it is being loaded or built."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether another server makes it."""


#: Called with what is done, of how much, and what goes on.
Progress = Callable[[int, int, Line], None]

_POLL_S = 0.1
#: Of a host's bar.
_WHOLE = 100
#: How long after a Compile node a prompt counts as running although it does not sample yet.
_PROMPT_S = 15.0


class Prompts:
    """The state of the server's prompts, as far as it concerns builds."""

    def __init__(self, check_cancelled: Callable[[], None]) -> None:
        """Set up; no run goes on.

        Args:
            check_cancelled: raises the host's interrupt when the user pressed Cancel.
        """
        self._check_cancelled = check_cancelled
        #: Runs that have begun and not ended.
        self.sampling = 0
        #: Until when a prompt counts as running, by the monotonic clock.
        self.until = 0.0
        self._waiting = False
        #: What is to be done once no run goes on.
        self._tasks: list[Callable[[], None]] = []

    def begin(self) -> None:
        """A run starts."""
        self.sampling += 1

    def end(self, *, sampled: bool) -> None:
        """A run ended; `sampled`: it was the prompt's sampling."""
        self.sampling = max(0, self.sampling - 1)
        while not self.sampling and self._tasks:
            self._tasks.pop()()
        if sampled:
            self.until = 0.0

    def stay_busy(self) -> None:
        """A prompt runs whose end will not be reported."""
        self.until = time.monotonic() + _PROMPT_S

    def when_idle(self, task: Callable[[], None]) -> bool:
        """Do something while no run goes on: now, or after the current one, in its thread.

        Returns:
            Whether it is done.
        """
        if self.sampling:
            self._tasks.append(task)
            return False
        task()
        return True

    def is_busy(self) -> bool:
        """Whether a prompt runs for which builds must leave room: not one that waits for them."""
        running = self.sampling > 0 or time.monotonic() < self.until
        return running and not self._waiting

    def wait(
        self,
        name: str,
        graphs: Sequence[Awaited],
        builder: Builder,
        on_progress: Progress | None,
    ) -> None:
        """Wait until none of these is pending.

        Args:
            name: of the model that needs them.
            on_progress: called at each change.

        Raises:
            What `check_cancelled` raises.
        """
        self._waiting = True
        try:
            self._wait(name, graphs, builder, on_progress)
        finally:
            self._waiting = False

    def _wait(
        self,
        name: str,
        graphs: Sequence[Awaited],
        builder: Builder,
        on_progress: Progress | None,
    ) -> None:
        told: tuple[int, int, Line] | None = None
        while True:
            self._check_cancelled()
            pending = [g for g in graphs if g.is_pending]
            now = _awaited(name, pending, builder.progress())
            if on_progress is not None and told != now:
                told = now
                on_progress(*now)
            if not pending:
                return
            time.sleep(_POLL_S)


def cancelled(progress: BuildProgress) -> Line:
    """Say that a waiting prompt was cancelled, and what happens to the builds."""
    if progress.paused:
        return line("cancelled_paused")
    return line("cancelled_building" if progress.done < progress.total else "cancelled")


def _awaited(
    name: str, pending: Sequence[Awaited], progress: BuildProgress
) -> tuple[int, int, Line]:
    """Say how much a prompt waits for, in hundredths, and what goes on."""
    done = round(_WHOLE * progress.fraction) if pending else _WHOLE
    if elsewhere := sum(each.is_elsewhere for each in pending):
        return done, _WHOLE, line("building_elsewhere", model=name, count=elsewhere)
    if progress.done < progress.total and pending:
        return done, _WHOLE, building_line(name, progress)
    return done, _WHOLE, line("loading", model=name)
