"""Runs of sessions: what is looked at when one begins, and told when it ends."""

from __future__ import annotations

from collections.abc import Callable

from ..contract import WhenMissing
from ..cuda_graphs.memory import CapturedMemory
from ..graphs.compiled_graph import State
from ..runtime.bound import Placement
from ..runtime.faults import CAPTURES, STEP, TELLING
from ..runtime.scope import Scope
from ..runtime.session import ModelCopy, Session
from .prompts import Prompts
from .requests import Requests
from .settings import Settings


class SessionRuns:
    """Begins and ends the runs of the process's sessions (`attaching.attached.Runs`)."""

    def __init__(
        self,
        requests: Requests,
        prompts: Prompts,
        captured: CapturedMemory,
        settings: Settings,
        tell: Callable[[Session], None],
    ) -> None:
        """Set up.

        Args:
            requests: asks for graphs.
            prompts: the running ones.
            captured: what is captured.
            settings: the user's.
            tell: tells people what ran.
        """
        self._requests, self._prompts, self._captured = requests, prompts, captured
        self._settings, self._tell = settings, tell

    def begin(
        self, session: Session, placement: Callable[[], Placement] | None, *, told: bool = True
    ) -> None:
        """A run starts: look again at what may have changed since the node ran."""
        if told:
            self._prompts.begin()
            self._captured.sweep()
        if placement is None:
            session.begin_run()
        else:
            self.look(session, placement)

    def end(self, session: Session, *, sampled: bool = False, told: bool = True) -> None:
        """A run ended: report what ran. Never fails a prompt."""
        if told:
            self._prompts.end(sampled=sampled)
        for scope in session.scopes:
            scope.faults.spare(STEP, "ending a run", scope.end_run)
        faults = session.scope.faults
        faults.spare(TELLING, "noting what ran", session.end_run)
        faults.spare(TELLING, "telling what ran", self._tell, session)
        faults.spare(STEP, "asking for what it needed", self._ask_further, session)
        if told and not self._settings.keeps_captured:
            faults.spare(CAPTURES, "giving captured calls back", self._captured.drop_all)

    def look(self, session: Session, placement: Callable[[], Placement]) -> None:
        """Look again at what may have changed since the node ran.

        Nothing that goes wrong here may fail a prompt that the host alone would finish.
        """
        session.begin_run()
        faults = session.scope.faults
        if faults.of(STEP) is None:
            given = (session, session.scope, placement)
            faults.spare(STEP, "looking at the model", self._look, *given)

    def begin_card(
        self, session: Session, card: ModelCopy, placement: Callable[[], Placement]
    ) -> None:
        """A copy of a session's root module takes part in the run."""
        self._look(session, card.scope, placement)

    def _look(self, session: Session, scope: Scope, ask: Callable[[], Placement]) -> None:
        self._requests.look(session, scope)
        placement = ask()
        for each in session.beside(scope):
            if each.is_stale(placement):
                session.describe(placement.device, placement.dtype, each)
            each.begin_run()
        wanted = [g for g in session.all_graphs if g.state is State.MISSING]
        if wanted and not session.does_without:
            self._requests.ask(session, wanted)
        session.does_without = False

    def _ask_further(self, session: Session) -> None:
        """Ask for graphs that calls of the run needed: they may be there when the next begins."""
        further = (graph for scope in session.scopes for graph in scope.second_graphs)
        wanted = [g for g in further if g.state is State.MISSING and g.reason is None]
        if wanted:
            self._requests.ask(session, wanted)

    def stay_busy(self) -> None:
        """A prompt runs whose end will not be reported."""
        self._prompts.stay_busy()

    def await_graphs(self, session: Session) -> None:
        """Wait within a run for pending graphs, if the user chose that."""
        if session.options.when_missing is WhenMissing.WAIT:
            kinds = (kind for scope in session.scopes for kind in scope.serving)
            self._requests.wait(session, [kind.graph for kind in kinds if kind.graph is not None])
