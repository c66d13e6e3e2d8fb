"""What is known of a structure, while several threads change it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.contract import BuildResult, Job
from warmgraph_backends.events import Events
from warmgraph_backends.graphs.learned_models import Known, LearnedModel, LearnedModels, unusable
from warmgraph_backends.reasons import of
from warmgraph_backends.storing.canonical_json import canonical_json
from warmgraph_backends.storing.graph_file import compress_payload

STRUCTURE = "ab" * 32
RECORD = {"root": "a:Model", "ways": [], "blocks": [], "outside": []}
REASON = of("learned_random")


class Kept:
    """Records in memory; what is to happen while one is written."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], Any] = lambda: None
        self.kept: list[Any] = []

    def find(self, structure: str, folders: Any) -> None:
        return None

    def keep(self, structure: str, record: Any) -> None:
        self.kept.append(record)
        self.meanwhile()


class Asked:
    """A builder whose jobs end when a test says so."""

    def __init__(self) -> None:
        self.futures: list[Future[BuildResult]] = []

    def submit(self, job: Job) -> Future[BuildResult]:
        self.futures.append(Future())
        return self.futures[-1]

    def end(self) -> None:
        payload = compress_payload(canonical_json(RECORD).encode())
        self.futures[-1].set_result(BuildResult("key", payload, {}, 0.0))


@pytest.fixture
def parts(tmp_path: Path) -> tuple[LearnedModels, Kept, Asked]:
    kept, asked = Kept(), Asked()
    return LearnedModels(kept, asked, Events()), kept, asked  # type: ignore[arg-type]


def test_what_is_refused_while_a_record_is_written_stays_refused(
    parts: tuple[LearnedModels, Kept, Asked],
) -> None:
    lessons, kept, asked = parts
    lesson = lessons.of(STRUCTURE)
    lessons.teach(lesson, "a:Model", {})
    kept.meanwhile = lambda: lessons.refuse(lesson, REASON)
    asked.end()
    assert kept.kept and lesson.known.problem == REASON and not lesson.is_pending
    assert lesson.known.record is not None


def test_what_is_refused_while_it_is_learned_stays_refused(
    parts: tuple[LearnedModels, Kept, Asked],
) -> None:
    lessons, _, asked = parts
    lesson = lessons.of(STRUCTURE)
    lessons.teach(lesson, "a:Model", {})
    lessons.refuse(lesson, REASON)
    assert lesson.is_pending
    asked.end()
    assert lesson.known.problem == REASON and not lesson.is_pending


def test_changes_of_several_threads_wait_for_one_another() -> None:
    """One that had read before another stored would take its change back, for ever."""
    held: list[bool] = []

    class Watched(LearnedModel):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "known" and hasattr(self, "_lock"):
                held.append(self._lock.locked())
            super().__setattr__(name, value)

    lesson = Watched(STRUCTURE)
    held.clear()
    assert lesson.begin()
    lesson.end(Known(record=dict(RECORD), steps=1))
    lesson.refuse(REASON)
    assert held == [True, True, True]


def test_no_lock_is_held_while_a_record_is_written_and_while_others_are_told(
    parts: tuple[LearnedModels, Kept, Asked],
) -> None:
    lessons, kept, asked = parts
    lesson = lessons.of(STRUCTURE)
    free: list[bool] = []
    kept.meanwhile = lambda: free.append(not lesson._lock.locked())
    lessons._events.publish = lambda *_: kept.meanwhile()  # type: ignore[method-assign]
    lessons.teach(lesson, "a:Model", {})
    asked.end()
    assert free == [True, True]


def test_of_two_steps_that_were_watched_at_once_one_is_learned_from(
    parts: tuple[LearnedModels, Kept, Asked],
) -> None:
    lessons, _, asked = parts
    lesson = lessons.of(STRUCTURE)
    for _ in range(2):
        lessons.teach(lesson, "a:Model", {})
    assert len(asked.futures) == 1 and lesson.known.steps == 1


def test_a_job_that_cannot_be_asked_for_is_not_waited_for(
    parts: tuple[LearnedModels, Kept, Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons, _, asked = parts
    lesson = lessons.of(STRUCTURE)

    def fail(job: Job) -> Any:
        raise OSError("no")

    monkeypatch.setattr(asked, "submit", fail)
    with pytest.raises(OSError, match="no"):
        lessons.teach(lesson, "a:Model", {})
    assert not lesson.is_pending


def test_a_record_that_cannot_be_used_is_told(parts: tuple[LearnedModels, Kept, Asked]) -> None:
    lessons, _, asked = parts
    lesson = lessons.of(STRUCTURE)
    lessons.teach(lesson, "b:Other", {})
    asked.end()
    assert lesson.known.problem is not None and not lesson.is_pending
    assert lesson.known.problem.key == "learned_unusable"


def test_of_a_model_without_a_name_nothing_is_used() -> None:
    lesson = unusable(REASON)
    assert lesson.known.problem == REASON and not lesson.may_be_watched
