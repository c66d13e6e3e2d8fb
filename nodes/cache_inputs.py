"""The common inputs of the cache nodes, and their validation."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends.caching.numbers import parse_steps
from ..backends.errors import shown, validate_length

#: Of a widget that takes a share of something.
SHARE: dict[str, float] = {"min": 0.0, "max": 1.0, "step": 0.01}


def schedule_problem(schedule: str | None, names: Sequence[str]) -> str | None:
    """Say what is wrong with the name of a schedule, or None.

    Args:
        schedule: None if linked.
        names: the valid ones.
    """
    if schedule is None or schedule in names:
        return None
    return f"schedule must be one of {', '.join(names)}, got {shown(schedule)}"


def part_problem(start_percent: float | None, end_percent: float | None) -> str | None:
    """Say what is wrong with the part of a run that a user chose, or None.

    Args:
        start_percent, end_percent: shares of a run; None if linked.
    """
    for name, value in (("start_percent", start_percent), ("end_percent", end_percent)):
        if value is not None and not SHARE["min"] <= value <= SHARE["max"]:
            return f"{name} must be from {SHARE['min']:g} to {SHARE['max']:g}, got {value}"
    if start_percent is not None and end_percent is not None and start_percent > end_percent:
        return (
            f"start_percent must not be larger than end_percent, got {start_percent} and "
            f"{end_percent}"
        )
    return None


def numbers_problem(full_steps: str | None, are_used: bool) -> str | None:
    """Say what is wrong with step numbers as a user wrote them, or None.

    Args:
        are_used: whether the schedule uses them.
    """
    try:
        if are_used and full_steps is not None:
            parse_steps(full_steps)
        elif full_steps is not None:
            validate_length("full_steps", full_steps)
    except ValueError as error:
        return str(error)
    return None
