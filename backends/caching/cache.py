"""A cache over the steps of a sampler run: it begins and ends with one, and is off if its own code
fails.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from textwrap import shorten
from typing import Any, Generic, TypeVar

import torch

from ..events import Event, Events
from ..host_api.execution import is_interrupt
from ..reasons import Reason, of
from .run import CachedRun
from .tally import Tally

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=CachedRun[Any])


class Cache(Generic[R]):
    """Keeps part of a model's evaluations within each sampler run. Only counts outlive the run.

    Attributes:
        id: its name in reports.
        evaluations: how many there were so far, by sort (`tally`).
        tally: what the last run did; None before the first.
        problem: why it was not used in the last run, if so.
    """

    #: As people call it, and the key of "something of it failed".
    name: str
    failed_key: str

    def __init__(self, events: Events, *, identifier: str) -> None:
        """Set up for one clone of a model.

        Args:
            events: gets the end of each run.
            identifier: its name in reports.
        """
        self.id = identifier
        self._events = events
        self.evaluations: Counter[str] = Counter()
        self.tally: Tally | None = None
        self.problem: Reason | None = None
        self._run: R | None = None

    def around_sampler(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's SAMPLER_SAMPLE wrapper: state begins and ends with one run."""
        before, self.problem = self._run, None
        self._run = run = self._guarded(self._begin, *args)
        try:
            told = None if run is None else self._guarded(self._telling, run, *args)
            return executor(*(told or args), **kwargs)
        finally:
            self._run = before
            if run is not None:
                self._guarded(self._ended, run)
            self._events.publish(Event.RUN_ENDED)

    def _begin(self, guider: Any, sigmas: torch.Tensor, extra: Any, *others: Any) -> R | None:
        """Return the run that begins, None if the host makes all of it."""
        raise NotImplementedError

    def _ended(self, run: R) -> None:
        """Keep what a run did."""
        self.tally = run.tally

    def _telling(
        self, run: R, guider: Any, sigmas: Any, extra: Any, callback: Any, *others: Any
    ) -> tuple[Any, ...]:
        """The sampler's arguments with a callback that reports its steps."""

        def after_step(number: int, *given: Any, **named: Any) -> Any:
            if self.problem is None:
                self._guarded(run.called_back, number)
            return None if callback is None else callback(number, *given, **named)

        return guider, sigmas, extra, after_step, *others

    def around_evaluation(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's PREDICT_NOISE wrapper: one evaluation of all conditionings."""
        if self._run is not None and self.problem is None:
            self._guarded(self._run.kept.begin_evaluation)
        return executor(*args, **kwargs)

    # --- stepping aside ---------------------------------------------------------------------------

    def _guarded(self, ours: Callable[..., T], *args: Any) -> T | None:
        """Call our own code; if it fails, the host makes the rest of the run."""
        try:
            return ours(*args)
        except Exception as error:
            if is_interrupt(error):  # the user's cancel, wherever it is raised
                raise
            self._failed(error)
            return None

    def _failed(self, error: Exception, text: str | None = None) -> None:
        text = f"{type(error).__name__}: {error}" if text is None else text
        short = shorten(text, 120, placeholder="...")
        self._step_aside(of(self.failed_key, error=short), error)

    def _step_aside(self, why: Reason, error: Exception | None = None) -> None:
        """Leave the rest of this run to the host."""
        self.problem = why
        if self._run is not None:
            self._run.let_go()  # free its memory for the host
        logger.warning("%s: %s", self.name, why, exc_info=error)
