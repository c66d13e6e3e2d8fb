"""What sessions ask for: their graphs, and what is known of models that no family describes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..building.builder import Builder
from ..compilers.registry import resolve_backend
from ..contract import AUTO, WhenMissing
from ..fleet.remote import Remote
from ..graphs.compiled_graph import CompiledGraph
from ..graphs.library import Graphs
from ..host_api.memory import default_device, spare_vram
from ..live import Live
from ..runtime.faults import LEARNING
from ..runtime.scope import Scope
from ..runtime.session import Session
from ..target.target import target_name
from .inventory import targets_here
from .prompts import Awaited, Progress, Prompts
from .workflow_links import WorkflowLinks, WorkflowRef


class Requests:
    """Asks for the process's sessions, and waits for what their users wait for."""

    def __init__(
        self,
        sessions: Live[Session],
        prompts: Prompts,
        builder: Builder,
        graphs: Graphs,
        links: WorkflowLinks,
        current_workflow: Callable[[], WorkflowRef | None],
    ) -> None:
        """Set up; nothing is asked for.

        Args:
            sessions: all of the process.
            prompts: the running ones.
            builder: who builds, and learns.
            graphs: who has graphs.
            links: keeps graph folders filled.
            current_workflow: the saved workflow of the prompt that runs now, if any.
        """
        self._sessions, self._prompts, self._builder = sessions, prompts, builder
        self._graphs, self._links, self._current_workflow = graphs, links, current_workflow
        #: Of the models that have sessions: their weights will want VRAM.
        self.patchers: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Bytes of VRAM that sampling did not need when graphs were last asked for.
        self.spare_vram: int | None = None

    def ask(self, session: Session, graphs: Sequence[CompiledGraph]) -> None:
        """Have a session's graphs loaded, or built if its user wants that."""
        build = session.options.when_missing is not WhenMissing.NEVER
        if build:
            self.spare_vram = spare_vram(self.patchers)
        session.expect(graphs)
        self._graphs.request(graphs, self._folders(session), build=build)

    def wait(
        self, session: Session, wanted: Sequence[Awaited], on_progress: Progress | None = None
    ) -> None:
        """Wait for what was asked for, until it is there or the user cancels."""
        self._prompts.wait(session.name, wanted, self._builder, on_progress)

    def look(self, session: Session, scope: Scope, on_progress: Progress | None = None) -> None:
        """Look for what is known of a session's model; a user who waits for graphs waits for this,
        too.

        Args:
            scope: of the model, or of a copy of it.
        """
        lesson = scope.planner.find(self._folders(session), scope.faults)
        if lesson is not None and session.options.when_missing is WhenMissing.WAIT:
            self.wait(session, [lesson], on_progress)

    def learned(self) -> None:
        """A worker has learned: graphs are requested once no run goes on, not only when the next
        one begins; from any thread.
        """
        self._prompts.when_idle(self._ask_anew)

    def _ask_anew(self) -> None:
        for session in self._sessions.values():
            faults = session.scope.faults
            if faults.spare(LEARNING, "looking at what was learned", session.look_again):
                self.ask(session, session.all_graphs)
                self._links.expect(session, self._links.last(session))

    def _folders(self, session: Session) -> list[Path]:
        workflow = self._current_workflow() or self._links.last(session)
        folder = self._links.folder(session, workflow)
        return [] if folder is None else [folder]


def mirror(remote: Remote) -> None:
    """Have what machines share for this one's cards in the store, before a model asks for it."""
    device = default_device().type
    for target in targets_here(device, resolve_backend(AUTO, device).backend.name):
        remote.mirror(target_name(target))
