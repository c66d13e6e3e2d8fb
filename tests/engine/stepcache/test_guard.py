"""Whatever of Step Cache's own raises, the run ends as the host's, with one warning; what the host
raises passes through, once.
"""

from __future__ import annotations

import logging

import pytest
import torch

from ..deepcache.cached import Pair
from ..raising import make_raise, names_of
from .stepped import STEPS, cache_of, stepped

MODULES = (
    *("caching.cache", "caching.patches", "caching.places", "caching.run", "caching.tally"),
    *("stepcache.cache", "stepcache.forecast", "stepcache.run", "stepcache.schedule"),
)
#: Where the host calls ours or ours the host: they tell whose an exception is.
BOUNDARIES = {
    "Cache.around_evaluation",
    "Cache.around_sampler",
    "Cache._guarded",
    "Cache._failed",
    "Cache._step_aside",
    "StepCache.around_batch",
}
#: Only for nodes and reports, after a run, or of what the run here does not use.
OUTSIDE = {
    "Cache.__init__",
    "Cache._begin",
    "Cache._ended",
    "StepCache.__init__",
    "StepCache._ended",
    "StepCacheOptions.__init__",
    "Tally.__init__",
    "Tally.chunks",
    "Tally._times",
    "Tally.seconds_saved",
    "Tally.seconds_without",
    "_role",
    "_stopwatch",
    "Patch.name",
    "_name",
    "CachedRun.let_go",
    "Places.__iter__",
    "Places.clear",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if i % 4 else [])
        for i, n in enumerate(names_of(MODULES, BOUNDARIES | OUTSIDE))
    ],
)
def test_a_run_in_which_one_of_ours_raises_ends_as_the_hosts(
    xl: Pair, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From its first call on: nothing was forecast before."""
    expected = xl.sample(xl.model, steps=STEPS)
    ours = stepped(xl.model, speed=2.0)
    cache = cache_of(ours)
    make_raise(name, MODULES, monkeypatch)
    with caplog.at_level(logging.WARNING):
        image = xl.sample(ours, steps=STEPS)
    assert cache.problem is not None and "OnPurposeError" in cache.problem, "it was not called"
    assert torch.equal(image, expected)
    warnings = [record for record in caplog.records if "Step Cache" in record.getMessage()]
    assert len(warnings) == 1 and warnings[0].exc_info
    monkeypatch.undo()
    xl.sample(ours, steps=STEPS)
    assert cache.problem is None and cache.evaluations["forecast"] > 0, "the next run is ours again"
