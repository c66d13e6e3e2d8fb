"""Weakly held objects, listed by one thread while another one makes and drops them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from warmgraph_backends.live import Live


class _Thing:
    pass


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_only_what_is_kept_is_listed_in_the_order_it_came() -> None:
    live: Live[_Thing] = Live()
    one, two, other = _Thing(), _Thing(), _Thing()
    for name, thing in (("one", one), ("two", two), ("other", other)):
        live.add(name, thing)
    assert live.items() == [("one", one), ("two", two), ("other", other)]
    del two
    assert live.values() == [one, other]
    assert list(live._references) == ["one", "other"]


def test_a_name_that_is_given_again_is_the_newer_ones() -> None:
    live: Live[_Thing] = Live()
    old, new = _Thing(), _Thing()
    live.add("name", old)
    live.add("name", new)
    del old
    assert live.items() == [("name", new)]


def test_it_is_listed_while_things_come_and_go(restless: None) -> None:
    """The standard library's WeakValueDictionary raises here within milliseconds."""
    live: Live[_Thing] = Live()
    problems: list[BaseException] = []
    over = threading.Event()

    def look() -> None:
        try:
            while not over.is_set():
                live.values()
        except BaseException as error:
            problems.append(error)

    watcher = threading.Thread(target=look)
    watcher.start()
    kept: list[_Thing] = []
    end = time.monotonic() + 0.5
    number = 0
    while (time.monotonic() < end or number <= 100) and not problems:
        number += 1
        kept.append(_Thing())
        live.add(number, kept[-1])
        del kept[:-500]
    over.set()
    watcher.join()
    assert not problems
    assert len(live.items()) == len(kept)
