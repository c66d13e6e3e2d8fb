"""The one word for how far a model is on its way to being faster."""

from __future__ import annotations

from typing import Any

import pytest

from warmgraph_backends.runtime.gains import Gain
from warmgraph_backends.runtime.last_run import PartCounts
from warmgraph_backends.runtime.pace import COMPILED, EAGER, Speed
from warmgraph_backends.sessions.stages import stage_of

NONE, NEW, RAN, LEFT = (
    PartCounts(0, 0, 0, []),
    PartCounts(0, 8, 0, []),
    PartCounts(8, 0, 0, []),
    PartCounts(0, 0, 0, [("a", "no compiled graph")]),
)
PLAIN = Speed(EAGER, "64x64", {EAGER: 61.0})
QUICK = Speed(COMPILED, "64x64", {COMPILED: 31.0})


@pytest.mark.parametrize(
    ("parts", "speed", "factor", "standing", "more", "stage"),
    [
        (NONE, None, None, "waiting", {}, "waiting"),
        (LEFT, PLAIN, None, "building", {"is_building": True}, "compiling"),
        (LEFT, QUICK, 1.4, "building", {"is_building": True}, "compiling"),
        (LEFT, None, None, "building", {}, "waiting"),  # files are being loaded
        (NEW, PLAIN, None, "waiting", {}, "ready"),
        (NEW, None, None, "waiting", {}, "ready"),
        (NEW, PLAIN, None, "waiting", {"is_left": True}, "waiting"),  # the others were cancelled
        (RAN, None, None, "compiled", {}, "ready"),  # a VAE's calls are not timed
        (RAN, QUICK, None, "compiled", {}, "ready"),
        (RAN, QUICK, 3.0, "compiled", {}, "faster"),
        (PartCounts(5, 3, 0, []), QUICK, 1.4, "compiled", {}, "ready"),  # no run had all of it yet
        (RAN, QUICK, 1.3, "partly", {}, "faster"),
        (NONE, QUICK, 1.2, "replayed", {}, "faster"),
        (RAN, QUICK, 1.01, "compiled", {}, "same"),
        (RAN, QUICK, 0.8, "compiled", {}, "slower"),
        (RAN, QUICK, 1.2, "compiled", {"noise": 0.3}, "same"),
        (RAN, QUICK, 0.8, "compiled", {"noise": 0.3}, "same"),
        (NEW, None, None, "waiting", {"is_unused": True}, "unused"),
        (LEFT, None, None, "building", {"is_unused": True, "is_building": True}, "compiling"),
        (LEFT, PLAIN, None, "eager", {}, "normal"),
        (PartCounts(0, 0, 8, []), PLAIN, None, "waiting", {}, "normal"),
    ],
)
def test_a_model_is_at_one_stage(
    parts: PartCounts,
    speed: Speed | None,
    factor: float | None,
    standing: str,
    more: dict[str, Any],
    stage: str,
) -> None:
    told = {"is_building": False, "is_unused": False, "is_left": False, **more}
    gain = None if factor is None else Gain(factor, "64x64", told.pop("noise", 0.0))
    assert stage_of(parts, speed, gain, standing=standing, **told).value == stage
