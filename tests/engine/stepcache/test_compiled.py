"""Step Cache together with Compile Model, in whichever order the nodes come."""

from __future__ import annotations

import gc

from warmgraph_backends.stepcache.run import StepCacheOptions

from ..lab import Lab, relative
from ..probed import Probed
from .stepped import STEPS, evaluations, stepped

#: Errors of single calls add up over a run.
RUN_TOLERANCE = 2e-3


def test_computed_steps_run_compiled_in_both_orders(probed: Probed, lab: Lab) -> None:
    size = {"size": (9, 15), "steps": STEPS}
    expected = probed.sample(stepped(probed.plain), **size)
    jobs = lab.jobs()
    for model in (stepped(lab.compiled(probed.plain)), lab.compiled(stepped(probed.plain))):
        before = lab.engine.report(model)["calls"]["compiled"]
        found = probed.sample(model, **size)
        report = lab.engine.report(model)
        assert evaluations(model) == {"full": 7, "forecast": 5}
        calls = report["calls"]["compiled"] - before
        assert calls == 7 * report["regions"]["total"] and report["calls"]["eager"] == 0
        assert relative(found, expected) <= RUN_TOLERANCE
    assert lab.jobs() == jobs


def test_reports_have_its_line(probed: Probed, lab: Lab) -> None:
    engine = lab.engine
    alone, identifier = engine.caches.stepcache(probed.plain, StepCacheOptions(speed=2.0))
    both, _ = engine.caches.stepcache(lab.compiled(probed.plain), StepCacheOptions(speed=2.0))
    for model in (alone, both):
        assert "once a run has ended" in engine.report(model)["stepcache"]["text"]
        probed.sample(model, size=(8, 8), steps=12)
        report = engine.report(model)
        cache = report["stepcache"]
        assert 0 < cache["seconds_saved"] < cache["seconds_without"]
        times = f"{cache['seconds_saved']:.2f} of {cache['seconds_without']:.2f} s saved"
        assert f"6 of 12 steps computed, 2.0x; about {times}" in cache["text"]
        assert ("parts compiled" in report["text"]) is (model is both)
    assert {r["id"]: r["ran"] for r in engine.overview.snapshot()["stepcaches"]}[identifier]
    probed.sample(alone, size=(8, 8), steps=4)
    assert "fewer than 10" in engine.report(alone)["stepcache"]["text"]
    plain, _ = engine.caches.stepcache(probed.plain, StepCacheOptions(speed=1.0))
    assert "every step is computed" in engine.report(plain)["stepcache"]["text"]
    del alone, model
    gc.collect()
    assert identifier not in {r["id"] for r in engine.overview.snapshot()["stepcaches"]}
