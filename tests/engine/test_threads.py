"""Reports are made by other threads than the prompt's, which changes what they tell meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from warmgraph_backends.attaching.deepcache import apply
from warmgraph_backends.deepcache.run import DeepCacheOptions
from warmgraph_backends.events import Events
from warmgraph_backends.reasons import Reason
from warmgraph_backends.runtime.session import Session
from warmgraph_tools.inprocess import Host

from .lab import Lab

SECONDS = 2.0


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def never(make_lab: Callable[..., Lab], host: Host) -> tuple[Lab, Any]:
    """An engine that has nothing and builds nothing, and a model."""
    lab = make_lab(empty=True)
    return lab, host.load("narrow15")[0]


def _hammered(lab: Lab, change: Callable[[int], None]) -> None:
    """Change things over and over while other threads ask for reports, as the page's timer does,
    and tell of graphs that come, as the loader does; assert that none of them fails.
    """
    problems: list[BaseException] = []
    over = threading.Event()

    def watch(look: Callable[[], Any]) -> None:
        try:
            while not over.is_set():
                look()
        except BaseException as error:
            problems.append(error)

    threads = [
        threading.Thread(target=watch, args=(look,))
        for look in (lab.engine.overview.snapshot, lab.engine._graphs_changed)
    ]
    for thread in threads:
        thread.start()
    end, number = time.monotonic() + SECONDS, 0
    while (time.monotonic() < end or number <= 3) and not problems:
        change(number)
        number += 1
    over.set()
    for thread in threads:
        thread.join()
    assert not problems


def test_models_come_and_go(never: tuple[Lab, Any], restless: None) -> None:
    lab, model = never
    kept: list[Any] = []

    def change(_: int) -> None:
        kept.append(lab.engine.compile_model(model, when_missing="never"))
        del kept[:-3]

    _hammered(lab, change)


def test_deepcaches_come_and_go(never: tuple[Lab, Any], restless: None) -> None:
    lab, model = never
    kept: list[Any] = []

    def change(_: int) -> None:
        kept.append(lab.engine.caches.deepcache(model, DeepCacheOptions()))
        del kept[:-20]

    _hammered(lab, change)


def test_copies_of_a_root_come_and_go(never: tuple[Lab, Any], restless: None) -> None:
    lab, model = never
    compiled = lab.engine.compile_model(model, when_missing="never")
    session: Session = compiled.get_attachment("warmgraph")
    kept: list[Any] = []

    def change(_: int) -> None:
        _, cache = apply(model, DeepCacheOptions(branch=1), Events(), identifier="deepcache")
        session.scope_of(cache.branch.whole)
        session.scope_of(cache.branch.outer)
        kept.append(cache)
        del kept[:-3]

    _hammered(lab, change)


def test_steps_run_eager_for_ever_new_reasons(never: tuple[Lab, Any], restless: None) -> None:
    lab, model = never
    compiled = lab.engine.compile_model(model, when_missing="never")
    session: Session = compiled.get_attachment("warmgraph")

    def change(number: int) -> None:
        session.step(lambda: None, (), {}, not_ours=Reason.plain(f"reason {number % 1000}"))
        session.note(f"note {number % 1000}")
        if number % 1000 == 999:
            session._eager_calls.clear()
            session._notes.clear()

    _hammered(lab, change)
