"""A model that nobody described through Compile Model beside eager, call by call."""

from __future__ import annotations

from typing import Any

from warmgraph_backends.contract import WhenMissing
from warmgraph_backends.graphs.compiled_graph import State
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.watched import sample

from .lab import TOLERANCE, Lab, Probe

RECORDS = "user/__warmgraph/records"
#: Height, width, batch, tokens of the text, frames; the first one is watched.
CALLS = ((8, 8, 1, 13, 1), (12, 8, 1, 1, 1), (16, 10, 2, 40, 1), (4, 6, 3, 300, 1))


class Served:
    """A small transformer through Compile Model beside eager, call by call.

    Attributes:
        result: of the last run.
    """

    def __init__(
        self, host: Host, lab: Lab, kind: str, *, loaded: Any = None, **options: Any
    ) -> None:
        self.host, self.lab, self.kind = host, lab, kind
        self.probe = Probe()
        self.plain = self.probe.attach(loaded or transformers.load(kind))
        self.model = lab.compiled(self.plain, **{"when_missing": "background", **options})

    @property
    def report(self) -> Any:
        return self.lab.engine.report(self.model)

    @property
    def session(self) -> Any:
        return self.lab.engine._objects.carried(self.model)

    def run(self, sizes: tuple[int, ...] = CALLS[0]) -> tuple[int, float]:
        """One step; how many calls of blocks graphs served, and how far it is from eager."""
        self.probe.calls.clear()
        before = self.report["calls"]["compiled"]
        self.result = sample(self.host, self.kind, self.model, sizes)
        (call,) = self.probe.calls
        return self.report["calls"]["compiled"] - before, call.error

    def settle(self) -> None:
        """Wait for what was asked of the workers."""
        session = self.session
        self.lab.wait_until(lambda: not session.lesson.is_pending)
        record = session.lesson.known.record
        asks = session.options.when_missing is not WhenMissing.NEVER
        if asks and record is not None and record["ways"]:  # then its thread asks for graphs
            self.lab.wait_until(lambda: bool(session.graphs))
            self.lab.wait_until(
                lambda: all(g.state is not State.MISSING for g in session.all_graphs)
            )
        self.lab.settle()
        self.lab.wait_until(lambda: self.lab.is_settled(self.model))

    def learn(self) -> None:
        """The run that is watched, after which all is learned and built."""
        assert self.run() == (0, 0.0)
        self.settle()

    def check(self, sizes: tuple[int, ...] = CALLS[0], places: int = 2) -> None:
        """One step, by graphs at every place; before it one in which they are compared, where the
        like of it was not.
        """
        calls, error = self.run(sizes)
        if calls == 0:
            assert error == 0.0
            calls, error = self.run(sizes)
        assert calls == places and error <= TOLERANCE
        assert self.report["regions"] == {"total": places, "compiled": places, "eager": 0}

    def reasons(self) -> set[str]:
        """The keys of why parts ran at normal speed in the last run."""
        eager = self.session.scope.eager_places()
        return {why.cause.key for _, why in eager}
