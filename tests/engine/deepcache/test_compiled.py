"""DeepCache together with Compile Model: both halves run compiled, in whichever order the nodes
come, and nothing is built for it.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from warmgraph_backends.attaching.deepcache import carried
from warmgraph_backends.deepcache.run import DeepCacheOptions

from ..lab import Lab, relative
from ..probed import Probed
from .cached import STEPS, cached, evaluations

#: Errors of single calls add up over a run.
RUN_TOLERANCE = 2e-3


@pytest.fixture
def both(probed: Probed, lab: Lab) -> list[Any]:
    """DeepCache on Compile Model, and Compile Model on DeepCache."""
    plain = probed.plain
    return [cached(lab.compiled(plain)), lab.compiled(cached(plain))]


def test_both_orders_run_all_compiled_at_no_build(
    probed: Probed, lab: Lab, both: list[Any]
) -> None:
    expected = probed.sample(cached(probed.plain), size=(9, 15), steps=STEPS)
    plain = probed.sample(probed.plain, size=(9, 15), steps=STEPS)
    jobs = lab.jobs()
    found = []
    for model in both:
        before = lab.engine.report(model)["calls"]["compiled"]
        found.append(probed.sample(model, size=(9, 15), steps=STEPS))
        assert evaluations(model) == {"full": 3, "shallow": 4}
        report = lab.engine.report(model)
        session = model.get_attachment("warmgraph")
        places = {scope.root: len(scope.plan.places) for scope in session.scopes}
        branch = carried(model).branch  # type: ignore[union-attr]
        whole, outer = places[branch.whole.module], places[branch.outer.module]
        assert whole == report["regions"]["total"] > outer > 0
        # Two of the three full ones keep a feature; one shallow call more is the check's.
        assert report["calls"]["compiled"] - before == 3 * whole + 5 * outer
        assert report["calls"]["eager"] == 0 and report["regions"]["eager"] == 0, report["notes"]
        assert report["builds"] == 0
    assert lab.jobs() == jobs
    assert torch.equal(found[0], found[1])
    assert relative(found[0], expected) <= RUN_TOLERANCE < relative(found[0], plain)


def test_other_intervals_branches_sizes_and_batches_build_nothing(probed: Probed, lab: Lab) -> None:
    jobs = lab.jobs()
    compiled = lab.compiled(probed.plain)
    for options, size, batch in (
        ({"interval": 2}, (8, 8), 1),
        ({"interval": 5, "branch": 1}, (13, 10), 2),
        ({"interval": 3, "branch": 11}, (45, 30), 1),
    ):
        eager = probed.sample(cached(probed.plain, **options), size=size, batch=batch, steps=4)
        ours = cached(compiled, **options)
        found = probed.sample(ours, size=size, batch=batch, steps=4)
        assert relative(found, eager) <= RUN_TOLERANCE
        assert lab.engine.report(ours)["calls"]["eager"] == 0
    assert lab.jobs() == jobs


def test_interval_one_is_compile_model_alone(probed: Probed, lab: Lab) -> None:
    compiled = lab.compiled(probed.plain)
    alone = probed.sample(compiled, size=(8, 8), steps=3)
    assert torch.equal(probed.sample(cached(compiled, interval=1), size=(8, 8), steps=3), alone)


def test_what_lies_between_the_two_leaves_the_image_right(probed: Probed, lab: Lab) -> None:
    from comfy.patcher_extension import WrappersMP

    def between(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = executor(*args, **kwargs)
        return output * 0.99

    clone = probed.plain.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another", between)
    expected = probed.sample(cached(clone), size=(8, 8), steps=STEPS)
    found = probed.sample(cached(lab.compiled(clone)), size=(8, 8), steps=STEPS)
    assert relative(found, expected) <= RUN_TOLERANCE


def test_another_deepcache_on_the_same_model_runs_through_the_same_scopes(
    probed: Probed, lab: Lab
) -> None:
    """So that changing the interval builds and captures nothing."""
    compiled = lab.compiled(probed.plain)
    session = compiled.get_attachment("warmgraph")
    model = cached(compiled, interval=3)
    expected = probed.sample(model, size=(8, 8), steps=4)
    scopes = session.scopes
    assert len(scopes) == 3
    del model
    gc.collect()
    for interval in (2, 3, 5):
        found = probed.sample(cached(compiled, interval=interval), size=(8, 8), steps=4)
        assert torch.equal(found, expected) is (interval == 3)
        assert set(session.scopes) == set(scopes)
    probed.sample(cached(compiled, branch=1), size=(8, 8), steps=4)
    assert len(session.scopes) == 5


def test_what_a_deepcache_below_made_goes_with_it(probed: Probed, lab: Lab) -> None:
    cache = cached(probed.plain)
    model = lab.compiled(cache)
    session = model.get_attachment("warmgraph")
    probed.sample(model, size=(8, 8), steps=4)
    assert len(session.scopes) == 3
    gone = weakref.ref(carried(model))
    del model, cache
    gc.collect()
    assert gone() is None
    gc.collect()
    assert session.scopes == [session.scope]


def test_reports_have_its_line(probed: Probed, lab: Lab) -> None:
    engine = lab.engine
    alone, identifier = engine.caches.deepcache(probed.plain, DeepCacheOptions(interval=2))
    both, _ = engine.caches.deepcache(lab.compiled(probed.plain), DeepCacheOptions(interval=2))
    for model in (alone, both):
        probed.sample(model, size=(8, 8), steps=4)
        report = engine.report(model)
        text = f"{report['text']}\n{report['deepcache']['text']}"
        assert "DeepCache, last run: " in text and "2 full + 2 shallow" in text
        assert ("parts compiled" in text) is (model is both)
    assert {r["id"]: r["ran"] for r in engine.overview.snapshot()["deepcaches"]}[identifier]
    del alone, model
    gc.collect()
    assert identifier not in {r["id"] for r in engine.overview.snapshot()["deepcaches"]}
