"""Step Cache under every sampler of the host: which evaluations are of one step."""

from __future__ import annotations

import pytest
import torch

from ..deepcache.cached import Pair
from ..deepcache.sampling import Trace
from ..deepcache.test_samplers import SEVERAL, SOLVERS, _names
from .stepped import FULL, STEPS, Reference, cache_of, check, evaluations, stepped

#: One of each sort where not all tests run.
FEW = {"euler", "dpmpp_2m", "euler_cfg_pp", "er_sde", "heun", "dpm_2_ancestral"}


def _some(names: list[str]) -> list[object]:
    return [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("sampler", _some([*_names(), *SEVERAL, *SOLVERS]))
def test_with_all_steps_computed_nothing_changes(xl: Pair, sampler: str) -> None:
    ours = stepped(xl.model, range(STEPS))
    sampling = {"sampler": sampler, "steps": STEPS}
    assert torch.equal(xl.sample(ours, **sampling), xl.sample(xl.model, **sampling))
    assert evaluations(ours)["forecast"] == 0


@pytest.mark.parametrize("sampler", _some(_names()))
def test_samplers_of_one_evaluation_a_step(xl: Pair, sampler: str) -> None:
    assert check(xl, sampler=sampler) == {"full": 7, "forecast": 5}


@pytest.mark.parametrize("sampler", _some(list(SEVERAL)))
def test_what_is_evaluated_between_two_callbacks_is_one_step(xl: Pair, sampler: str) -> None:
    trace = Trace()
    xl.sample(trace.attach(xl.model), sampler=sampler, steps=STEPS)
    steps = [number for number, calls in enumerate(trace.steps) for _ in calls]
    assert steps.count(2) == SEVERAL[sampler]
    check(xl, reference=Reference(FULL, step_of=steps), sampler=sampler)


@pytest.mark.parametrize("sampler", [pytest.param(s, marks=pytest.mark.slow) for s in SOLVERS])
def test_solvers_that_make_steps_of_their_own(xl: Pair, sampler: str) -> None:
    """Those beyond the schedule's are computed."""
    ours = stepped(xl.model, {0, 1, 4, 8})
    image = xl.sample(ours, sampler=sampler, steps=STEPS)
    assert image.isfinite().all() and cache_of(ours).problem is None
