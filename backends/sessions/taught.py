"""Sessions of models that no family describes: finds what is known of them, and requests their
graphs as soon as a worker has learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..building.builder import Builder
from ..contract import WhenMissing
from ..graphs.compiled_graph import CompiledGraph
from ..runtime.faults import LEARNING
from ..runtime.live import Live
from ..runtime.scope import Scope
from ..runtime.session import Session
from .prompts import Progress, Prompts
from .workflow_links import WorkflowLinks

#: Have a session's graphs loaded, or built; where its workflow's files lie.
Request = Callable[[Session, Sequence[CompiledGraph]], None]
Folders = Callable[[Session], Sequence[Path]]


class Taught:
    """Brings what is learned to the process's sessions."""

    def __init__(
        self,
        sessions: Live[Session],
        prompts: Prompts,
        builder: Builder,
        links: WorkflowLinks,
        folders: Folders,
        request: Request,
    ) -> None:
        """Set up; nothing is looked for.

        Args:
            sessions: all of the process.
            prompts: the running ones.
            builder: whose workers learn.
            links: keeps graph folders filled.
            folders: a session's graph folders.
            request: has graphs loaded, or built.
        """
        self._sessions, self._prompts, self._builder = sessions, prompts, builder
        self._links, self._folders, self._request = links, folders, request

    def look(self, session: Session, scope: Scope, on_progress: Progress | None = None) -> None:
        """Look for what is known of a session's model; a user who waits for graphs waits for this,
        too.

        Args:
            scope: of the model, or of a copy of it.
        """
        lesson = scope.planner.find(self._folders(session), scope.faults)
        if lesson is not None and session.options.when_missing is WhenMissing.WAIT:
            self._prompts.wait(session.name, [lesson], self._builder, on_progress)

    def learned(self) -> None:
        """A worker has learned: graphs are requested once no run goes on, not only when the next
        one begins; from any thread.
        """
        self._prompts.when_idle(self._ask)

    def _ask(self) -> None:
        for session in self._sessions.values():
            faults = session.scope.faults
            if faults.spare(LEARNING, "looking at what was learned", session.look_again):
                self._request(session, session.all_graphs)
                self._links.expect(session, self._links.last(session))
