"""Two records of one model: ways of calls that differ are put together, and no more than helps."""

from __future__ import annotations

from typing import Any

import pytest

from warmgraph_backends.learning.together import MAX_WAYS, merged


def record(ways: dict[str, Any], *, outside: Any = (), blocks: tuple[str, ...] = ("b.0",)) -> Any:
    return {
        "root": "a:B",
        "ways": [[key, {"arguments": [["x", way]]}] for key, way in ways.items()],
        "blocks": [[name, "a:Block", [[key, []] for key in ways]] for name in blocks],
        "outside": [list(each) for each in outside],
    }


LEAF, NONE = ["leaf", 0], ["plain", None]
FIRST = record({"one": LEAF})


def keys(found: Any) -> list[str]:
    [[_, _, ways]] = found["blocks"]
    assert {key for key, _ in found["ways"]} == {key for key, _ in ways}
    return [key for key, _ in ways]


def test_another_way_is_added_once() -> None:
    later = record({"two": NONE})
    found = merged(FIRST, later)
    assert keys(found) == ["one", "two"]
    assert merged(found, later) == found


def test_what_differs_in_a_number_alone_is_no_other_way() -> None:
    """It would be yet another one in the next step."""
    found = merged(record({"one": ["plain", 0.5]}), record({"two": ["plain", 0.7]}))
    assert keys(found) == ["one"]


def test_a_block_called_in_too_many_ways_goes_on_as_it_was() -> None:
    many = {f"{i}": ["plain", f"{i}"] for i in range(MAX_WAYS)}
    assert keys(merged(FIRST, record(many))) == ["one"]


def test_a_block_that_was_refused_at_first_is_learned_later() -> None:
    first = record({"one": LEAF}, outside=[("c.0", {"text": "it was not called"})])
    later = record({"two": NONE}, blocks=("c.0",))
    found = merged(first, later)
    assert [name for name, *_ in found["blocks"]] == ["b.0", "c.0"]
    assert found["outside"] == []


@pytest.mark.parametrize("cls", ["a:Other"])
def test_a_block_of_another_class_is_not_put_together(cls: str) -> None:
    later = record({"two": NONE})
    later["blocks"][0][1] = cls
    assert keys(merged(FIRST, later)) == ["one"]
