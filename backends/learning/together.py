"""Merges two records of one model, learned from calls made in different ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Ways in which one block may be called, and all of a model's together.
MAX_WAYS, MAX_ALL_WAYS = 3, 12


def merged(first: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged record.

    A block with too many ways, or with ways that differ only in a number, stays as in the first
    record. Unused ways are left out.

    Args:
        first: the record in use.
        later: of the same root.
    """
    ways = {**dict(first["ways"]), **dict(later["ways"])}
    known = {name: [cls, calls] for name, cls, calls in first["blocks"]}
    for name, cls, calls in later["blocks"]:
        if name not in known:
            known[name] = [cls, calls]
        elif cls == known[name][0]:
            known[name] = [cls, _calls(known[name][1], calls, ways)]
    used = {key for _, calls in known.values() for key, _ in calls}
    if len(used) > MAX_ALL_WAYS:
        return dict(first)
    outside = dict([*later["outside"], *first["outside"]])
    return {
        **first,
        "ways": [[key, way] for key, way in ways.items() if key in used],
        "blocks": [[name, *known[name]] for name in known],
        "outside": [[name, why] for name, why in outside.items() if name not in known],
    }


def _calls(first: list[Any], later: list[Any], ways: Mapping[str, Any]) -> list[Any]:
    """The ways of one block."""
    found = list(first)
    for key, idle in later:
        if all(key != other for other, _ in found) and not any(
            _differ_in_numbers(ways[key], ways[other]) for other, _ in found
        ):
            found.append([key, idle])
    arguments = {tuple(name for name, _ in ways[key]["arguments"]) for key, _ in found}
    return found if len(found) <= MAX_WAYS and len(arguments) == 1 else list(first)


def _differ_in_numbers(way: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two ways differ only in numbers, as of a call that changes from step to step."""
    return bool(_without_numbers(way) == _without_numbers(other))


def _without_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_numbers(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) == 2 and value[0] == "plain" and type(value[1]) in (int, float):
            return ["plain", type(value[1]).__name__]
        return [_without_numbers(each) for each in value]
    return value
