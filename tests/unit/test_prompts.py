"""Prompts that wait: what their nodes say when the wait is cancelled."""

from __future__ import annotations

import pytest

from warmgraph_backends.building.pacing import BuildProgress
from warmgraph_backends.sessions.prompts import cancelled


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (BuildProgress(2, 8, ["one"], 30.0, 1, False), "Compiling goes on"),
        (BuildProgress(2, 8, [], None, 0, True), "Compiling is paused"),
        (BuildProgress(8, 8, [], None, 0, True), "Compiling is paused"),
    ],
    ids=["building", "paused", "paused, nothing waits"],
)
def test_what_becomes_of_the_builds_is_told_as_it_is(progress: BuildProgress, words: str) -> None:
    assert words in cancelled(progress).text


def test_nothing_is_told_of_builds_where_there_are_none() -> None:
    """Warm Up is cancelled within an empty step, say."""
    assert cancelled(BuildProgress(8, 8, [], None, 1, False)).text == "Cancelled."
