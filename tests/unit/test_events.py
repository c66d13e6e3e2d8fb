"""Events: everybody who listens is told, whoever fails."""

from __future__ import annotations

import logging
import threading

import pytest

from warmgraph_backends.events import Event, Events


def test_all_who_listen_to_an_event_are_told_in_the_order_they_came() -> None:
    events, told = Events(), []
    events.listen(lambda: told.append("first"), Event.RUN_ENDED)
    events.listen(lambda: told.append("every"), *Event)
    events.publish(Event.RUN_ENDED)
    assert told == ["first", "every"]
    events.publish(Event.GRAPH_CHANGED)
    assert told == ["first", "every", "every"]


def test_one_that_fails_is_logged_and_keeps_nobody_else_from_listening(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, told = Events(), []

    def fails() -> None:
        raise OSError("the listener is broken")

    events.listen(fails, Event.BUILDS_CHANGED)
    events.listen(lambda: told.append(True), Event.BUILDS_CHANGED)
    with caplog.at_level(logging.ERROR):
        events.publish(Event.BUILDS_CHANGED)
    assert told == [True]
    (record,) = caplog.records
    assert record.exc_info and Event.BUILDS_CHANGED.value in record.getMessage()


def test_a_listener_runs_in_the_thread_that_publishes_and_may_listen_to_more() -> None:
    events, threads = Events(), []

    def listens() -> None:
        threads.append(threading.current_thread())
        events.listen(listens, Event.GRAPH_CHANGED)

    events.listen(listens, Event.GRAPH_CHANGED)
    other = threading.Thread(target=events.publish, args=(Event.GRAPH_CHANGED,))
    other.start()
    other.join()
    assert threads == [other]
