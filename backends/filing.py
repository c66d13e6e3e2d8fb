"""Keeps graph folders filled: the graphs of a session, linked beside its workflow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import folders
from .errors import GraphFileError, WarmgraphError
from .runtime.graphs import State
from .runtime.session import Session
from .store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkflowRef:
    """The saved workflow of a prompt, as a page named it: nothing in it is checked yet."""

    path: str
    user: str | None
    id: str | None


class Filing:
    """Finds a session's graph folder and files its graphs there."""

    def __init__(self, store: Store, workflows: Callable[[str | None], Path | None]) -> None:
        """Args: the store that files are linked from, and a user's workflows folder."""
        self._store = store
        self._workflows = workflows

    def folder(self, session: Session, workflow: WorkflowRef | None) -> Path | None:
        """Return the graph folder of a session: the named one, or the one beside the workflow.

        A name or path that is not safe gives None and a line in the report.
        """
        root = self._workflows(workflow.user if workflow else None)
        if root is None:
            return None
        try:
            if session.options.folder_only:
                return folders.listed_folder(root, session.options.graphs)
            if session.options.graphs:
                return folders.named_folder(root, session.options.graphs)
            if workflow is None:
                return None
            return folders.workflow_folder(root.parent, workflow.path, workflow.id)
        except (WarmgraphError, OSError) as error:
            session.note(str(error))
            return None

    def file(self, session: Session) -> None:
        """Link every ready graph of a session into its folder (in the loader's thread).

        Does nothing while graphs are on their way; the engine calls again when they have come.
        """
        wanted = session.all_graphs
        if session.options.folder_only or any(g.is_pending for g in wanted):
            return
        session.filed = True
        workflow = session.workflow
        folder = self.folder(session, workflow)
        ready = [g for g in wanted if g.state is State.READY]
        if folder is None or not ready:
            return
        try:
            kept = [g.key for g in ready if self._store.link(g.key, folder)]
            path = workflow.path if workflow else ""
            folders.remember(folder, path, workflow.id if workflow else None, kept)
        except (OSError, GraphFileError) as error:
            session.note(f"the graphs could not be put into {folder.name}: {error}")
            logger.warning("Graphs could not be put into %s: %s", folder, error)
