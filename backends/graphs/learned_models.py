"""What is known of models that no family describes: found on disk, or learned by a worker from one
step that was watched.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from ..building.builder import Builder
from ..building.contract import BuildResult, Job
from ..errors import BuildError, CancelledBuildError, GraphFileError
from ..events import Event, Events
from ..learning.together import merged
from ..reasons import Reason, of
from ..storing.graph_file import unpack_payload
from ..storing.records import Records

logger = logging.getLogger(__name__)

#: Steps of one structure that are watched: the first, and later ones that show other ways.
MOST_STEPS = 1 + 3
#: Before any graph: nothing can be built until it is known how blocks are called.
_COST = 1 << 30
_TIMES = "steps"


class Known(NamedTuple):
    """What is known of one structure. Several threads read and write it, so it is replaced as a
    whole.

    Attributes:
        record: what was learned; None where nothing was.
        problem: why it is not used in this process.
        is_pending: whether a worker learns.
        steps: how many were watched.
    """

    record: dict[str, Any] | None = None
    problem: Reason | None = None
    is_pending: bool = False
    steps: int = 0


class LearnedModel:
    """One structure in this process, for all models that have it.

    Attributes:
        structure: its name.
        known: what is known of it.
    """

    #: As a graph's: no other server learns for this one.
    is_elsewhere = False

    def __init__(self, structure: str) -> None:
        self.structure = structure
        #: Read without the lock.
        self.known = Known()
        self._lock = threading.Lock()

    @property
    def is_pending(self) -> bool:
        """Whether a worker learns."""
        return self.known.is_pending

    @property
    def may_be_watched(self) -> bool:
        """Whether one more step may be."""
        known = self.known
        return known.problem is None and not known.is_pending and known.steps < MOST_STEPS

    def find(self, record: dict[str, Any]) -> None:
        """Take what was found on disk, if nothing is known yet."""
        with self._lock:
            if self.known == Known():
                learned = {name: each for name, each in record.items() if name != _TIMES}
                self.known = Known(record=learned, steps=int(record.get(_TIMES, 1)))

    def begin(self) -> bool:
        """Begin to learn from one more step; False: no more may be watched, or another step was."""
        with self._lock:
            may_be = self.may_be_watched
            if may_be:
                self.known = self.known._replace(is_pending=True, steps=self.known.steps + 1)
        return may_be

    def end(self, taken: Known) -> None:
        """End learning; what was refused meanwhile stays so.

        Args:
            taken: what is known now.
        """
        with self._lock:
            problem = self.known.problem or taken.problem
            self.known = taken._replace(problem=problem, is_pending=False)

    def refuse(self, reason: Reason) -> None:
        """Use nothing of it any more in this process."""
        with self._lock:
            self.known = self.known._replace(problem=reason)


def unusable(reason: Reason) -> LearnedModel:
    """Return one for a model without a name; nothing of it is used."""
    lesson = LearnedModel("")
    lesson.refuse(reason)
    return lesson


class LearnedModels:
    """All lessons of the process."""

    def __init__(self, records: Records, builder: Builder, events: Events) -> None:
        """Set up; nothing is read.

        Args:
            records: on disk.
            builder: whose workers learn.
            events: who is told of changes.
        """
        self._records, self._builder, self._events = records, builder, events
        self._lessons: dict[str, LearnedModel] = {}

    def of(self, structure: str, folders: Sequence[Path] = ()) -> LearnedModel:
        """Return what is known of a structure, from disk if nothing is known yet.

        Args:
            folders: graph folders to look in besides.
        """
        lesson = self._lessons.setdefault(structure, LearnedModel(structure))
        if lesson.known == Known() and (found := self._records.find(structure, folders)):
            lesson.find(found)
        return lesson

    def teach(self, lesson: LearnedModel, root: str, task: Mapping[str, Any]) -> None:
        """Have a worker learn from a watched step; returns at once. Of two steps watched at once it
        takes the first.

        Args:
            root: the name of the model's class.
            task: `learning.watching.task`.
        """
        if not lesson.begin():
            return
        label = root.rpartition(":")[2]
        job = Job(key=f"learn {lesson.structure}", label=label, cost=_COST, task=dict(task))
        logger.info("Warmgraph: a step of %s was watched: how it is called is learned", label)
        try:
            future = self._builder.submit(job)
        except Exception:
            lesson.end(lesson.known)
            raise
        future.add_done_callback(lambda done: self._arrived(lesson, root, done))

    def refuse(self, lesson: LearnedModel, reason: Reason) -> None:
        """Use nothing that was learned of a structure any more in this process. Publishes no event,
        because a step calls it under its scope's lock.
        """
        lesson.refuse(reason)

    def carry(self, lesson: LearnedModel, folder: Path) -> None:
        """Put a record into a graph folder, which exists.

        Raises:
            OSError: it cannot be written.
            GraphFileError: it cannot be signed.
        """
        if lesson.known.record is not None and lesson.known.problem is None:
            self._records.carry(lesson.structure, folder)

    def _arrived(self, lesson: LearnedModel, root: str, future: Future[BuildResult]) -> None:
        """Take a worker's outcome; whatever it is, learning ends."""
        before = lesson.known
        try:
            taken = self._taken(lesson, root, before, future)
        except Exception as error:  # the outermost frame of a thread
            logger.exception("What was learned of %s is not used", root)
            taken = before._replace(problem=of("learned_unusable", error=error))
        lesson.end(taken)
        self._events.publish(Event.LEARNED)

    def _taken(
        self, lesson: LearnedModel, root: str, before: Known, future: Future[BuildResult]
    ) -> Known:
        error = CancelledBuildError() if future.cancelled() else future.exception()
        if isinstance(error, CancelledBuildError):
            return before._replace(steps=before.steps - 1)
        if error is None:
            record = _read(future.result(), root)
            if before.record is not None:
                record = merged(before.record, record)
        elif not isinstance(error, BuildError):
            raise error
        elif before.record is not None:
            return before
        elif error.reason.of_model:  # the next process would not learn it again
            record = _nothing(root, error.reason)
        else:
            logger.warning("Warmgraph: %s runs at normal speed: %s", root, error.reason)
            return before._replace(problem=error.reason)
        try:
            self._records.keep(lesson.structure, {**record, _TIMES: before.steps})
        except (OSError, GraphFileError) as failure:
            logger.warning("What was learned of %s is not kept on disk: %s", root, failure)
        return before._replace(record=record)


def _nothing(root: str, reason: Reason) -> dict[str, Any]:
    """The record of a model that cannot be learned."""
    return {"root": root, "ways": [], "blocks": [], "outside": [["the model", reason.to_plain()]]}


def _read(result: BuildResult, root: str) -> dict[str, Any]:
    """A worker's record.

    Raises:
        ValueError: it is not one of this model.
    """
    record: Any = json.loads(unpack_payload(result.payload))
    lists = ("ways", "blocks", "outside")
    if not isinstance(record, dict) or record.get("root") != root:
        raise ValueError(f"a record of {root} must name it")
    if any(not isinstance(record.get(name), list) for name in lists):
        raise ValueError(f"a record must have {', '.join(lists)}")
    return record
