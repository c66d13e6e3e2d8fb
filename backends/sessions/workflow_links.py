"""Keeps graph folders filled: links the graphs of each run beside its workflow as they become
ready.

What is to be filed is kept here as long as graphs are pending, because the model that asked for
them may be gone by then.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import GraphFileError, WarmgraphError
from ..graphs.compiled_graph import CompiledGraph, State
from ..graphs.learned_models import LearnedModel, LearnedModels
from ..reasons import Reason, of
from ..runtime.session import Session, SessionOptions
from ..storing import folders
from ..storing.store import Store

logger = logging.getLogger(__name__)

#: Folders that wait for graphs at a time.
MAX_RECORDS = 256


@dataclass(frozen=True)
class WorkflowRef:
    """The saved workflow of a prompt, as a page named it; not checked yet."""

    path: str
    user: str | None
    id: str | None

    def became(self, other: WorkflowRef) -> bool:
        """Whether another name is this workflow, renamed or copied, by its id."""
        same = self.id is not None and (self.id, self.user) == (other.id, other.user)
        return same and self.path != other.path


class _Place(NamedTuple):
    """Where graphs go: a workflow, a name, or a folder of the list."""

    workflow: WorkflowRef | None
    graphs: str
    folder_only: bool

    @classmethod
    def of(cls, options: SessionOptions, workflow: WorkflowRef | None) -> _Place:
        return cls(workflow, options.graphs, options.folder_only)


@dataclass
class _Record:
    """What is still to be filed in one place, and the sessions to be told of problems.

    Graphs hold no model: descriptions are plain data, and weights are given at each call.
    """

    graphs: dict[str, CompiledGraph] = field(default_factory=dict)
    sessions: weakref.WeakSet[Session] = field(default_factory=weakref.WeakSet)
    #: By which models are cut that no family describes.
    lessons: set[LearnedModel] = field(default_factory=set)
    #: Graphs that were put there and were not there before.
    new: int = 0


class WorkflowLinks:
    """Finds graph folders and files graphs there."""

    def __init__(
        self,
        store: Store,
        workflows: Callable[[str | None], Path | None],
        lessons: LearnedModels | None = None,
    ) -> None:
        """Set up; nothing is filed yet.

        Args:
            store: the store that files are linked from.
            workflows: a user's workflows folder.
            lessons: what is known of models that no family describes.
        """
        self._store, self._lessons = store, lessons
        self._workflows = workflows
        self._lock = threading.Lock()
        self._records: dict[_Place, _Record] = {}
        #: The saved workflow of each session's last run.
        self._last: weakref.WeakKeyDictionary[Session, WorkflowRef] = weakref.WeakKeyDictionary()

    def folder(self, session: Session, workflow: WorkflowRef | None) -> Path | None:
        """Return the graph folder of a session: the named one, or the one beside the workflow.

        For an unsafe name or path returns None and puts a line into the report.
        """
        return self._folder(_Place.of(session.options, workflow), session.note)

    def why_none(self, options: SessionOptions, workflow: WorkflowRef | None) -> Reason | None:
        """Say why there is no folder for a node's setting, or None."""
        said: list[Reason] = []
        self._folder(_Place.of(options, workflow), said.append)
        return said[0] if said else None

    def expect(self, session: Session, workflow: WorkflowRef | None) -> None:
        """A run ended: its graphs belong beside a workflow, those that are ready and pending ones.

        `file` links them.
        """
        place = _Place.of(session.options, workflow)
        with self._lock:
            self._last.pop(session, None)
            if workflow is not None:
                self._last[session] = workflow
            if not place.folder_only and (workflow is not None or place.graphs):
                self._add(place, session.all_graphs, [session])

    def last(self, session: Session) -> WorkflowRef | None:
        """Return the saved workflow of a session's last run, if it has one."""
        with self._lock:
            return self._last.get(session)

    def moved(self, workflow: WorkflowRef) -> None:
        """A queued workflow may have been renamed since its graphs were requested: move them along,
        with pending ones.

        The host may serve a prompt from its cache without any of our nodes running.
        """
        with self._lock:
            for session, last in list(self._last.items()):
                if last.became(workflow):
                    self._last[session] = workflow
                    place = _Place.of(session.options, workflow)
                    self._add(place, session.all_graphs, [session])
            for place, record in list(self._records.items()):
                if place.workflow is not None and place.workflow.became(workflow):
                    new = place._replace(workflow=workflow)
                    self._add(new, list(record.graphs.values()), list(record.sessions))
                    self._records[new].lessons |= record.lessons

    def file(self) -> None:
        """Link what is ready into the folders that wait for it (in the loader's thread)."""
        with self._lock:
            waiting = [
                (place, record, [g for g in record.graphs.values() if not g.is_pending])
                for place, record in self._records.items()
            ]
        for place, record, come in waiting:
            ready = [graph.key for graph in come if graph.state is State.READY]
            if ready:
                with self._lock:
                    sessions, lessons = list(record.sessions), list(record.lessons)
                record.new += self._link(place, ready, sessions, lessons)
            with self._lock:
                for graph in come:
                    record.graphs.pop(graph.key, None)
                if not record.graphs and self._records.get(place) is record:
                    del self._records[place]
            if record.new and not record.graphs:
                where = f"beside {place.workflow.path}" if place.workflow else "in their folder"
                logger.info("Warmgraph: %d compiled graphs are filed %s", record.new, where)
                record.new = 0

    def _add(self, place: _Place, graphs: list[CompiledGraph], sessions: list[Session]) -> None:
        """Have graphs filed in a place; the lock is held."""
        record = self._records.pop(place, None) or _Record()
        self._records[place] = record  # the last one used
        record.graphs.update({graph.key: graph for graph in graphs})
        record.sessions.update(sessions)
        record.lessons.update(each.lesson for each in sessions if each.lesson is not None)
        while len(self._records) > MAX_RECORDS:
            oldest = next(iter(self._records))
            lost = len(self._records.pop(oldest).graphs)
            logger.info(
                "Warmgraph: %d compiled graphs are not put beside %s: too many wait",
                lost,
                oldest.workflow,
            )

    def _folder(self, place: _Place, note: Callable[[Reason], None]) -> Path | None:
        workflow = place.workflow
        root = self._workflows(workflow.user if workflow else None)
        if root is None:
            return None
        try:
            if place.folder_only:
                return folders.listed_folder(root, place.graphs)
            if place.graphs:
                return folders.named_folder(root, place.graphs)
            if workflow is None:
                return None
            return folders.workflow_folder(root.parent, workflow.path, workflow.id)
        except (WarmgraphError, OSError) as error:
            told = error.told if isinstance(error, WarmgraphError) else Reason.plain(str(error))
            note(told)
            return None

    def _link(
        self,
        place: _Place,
        keys: list[str],
        sessions: Sequence[Session],
        lessons: Sequence[LearnedModel],
    ) -> int:
        """Link graphs into a place's folder, with the records that their models are cut by; returns
        how many are new there.
        """

        def note(text: Reason) -> None:
            for session in sessions:
                session.note(text)

        folder = self._folder(place, note)
        if folder is None:
            return 0
        workflow, known = place.workflow, folders.folder_keys(folder)
        try:
            kept = [key for key in keys if self._store.link(key, folder)]
            if kept and self._lessons is not None:
                for lesson in lessons:
                    self._lessons.carry(lesson, folder)
            path = workflow.path if workflow else ""
            folders.remember(folder, path, workflow.id if workflow else None, kept)
        except (OSError, GraphFileError) as error:
            note(of("not_put", folder=folder.name, error=error))
            logger.warning("Compiled graphs could not be put into %s: %s", folder, error)
            return 0
        return len(set(kept) - set(known))
