"""How far a model is on its way to being faster, in one word."""

from __future__ import annotations

from enum import Enum

from ..runtime.gains import Gain
from ..runtime.last_run import PartCounts
from ..runtime.pace import EAGER, Speed


class Stage(str, Enum):
    """What a page shows first of a model.

    READY: all that can be compiled is, and the gain was not measured yet. NORMAL: nothing of it is
    compiled. UNUSED: no sampler used it in the prompt that attached it.
    """

    WAITING = "waiting"
    COMPILING = "compiling"
    READY = "ready"
    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    NORMAL = "normal"
    UNUSED = "unused"


def stage_of(
    parts: PartCounts,
    speed: Speed | None,
    gain: Gain | None,
    *,
    standing: str,
    is_building: bool,
    is_unused: bool,
    is_left: bool,
) -> Stage:
    """Say how far a model is.

    Args:
        parts: how its parts stand.
        speed: of its last steps; None if not known.
        gain: of its last steps; None if not known.
        standing: see a model's report.
        is_building: whether something that it waits for is being built.
        is_unused: whether the last prompt did not run it.
        is_left: whether the next run will build something for it, as after a cancel.
    """
    if standing == "building":
        return Stage.COMPILING if is_building else Stage.WAITING
    if is_unused:
        return Stage.UNUSED
    if standing == "waiting" and not parts.ready:
        return Stage.NORMAL if parts.idle and speed is not None else Stage.WAITING
    if standing == "eager":
        return Stage.NORMAL
    if parts.ready or gain is None or (speed is not None and speed.form == EAGER):
        return Stage.WAITING if is_left else Stage.READY
    return Stage(gain.verdict.value)
