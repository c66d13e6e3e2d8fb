"""Whatever of Step Cache's own raises, the run ends as the host's, with one warning; what the host
raises passes through, once.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from enum import Enum
from types import FunctionType
from typing import Any

import pytest
import torch

from ..deepcache.cached import Pair
from ..deepcache.test_guard import _raising
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
    "Options.__init__",
    "Tally.__init__",
    "Tally.chunks",
    "Tally.seconds_saved",
    "_role",
    "_stopwatch",
    "Patch.name",
    "_name",
    "Run.let_go",
    "Places.__iter__",
    "Places.clear",
}


def _functions() -> Iterator[tuple[str, Any, str, Any]]:
    """(name, owner, attribute, function) of every function of Step Cache's."""
    for module_name in MODULES:
        module = importlib.import_module(f"warmgraph_backends.{module_name}")
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, FunctionType):
                yield name, module, name, value
            elif inspect.isclass(value) and not issubclass(value, Enum):
                for attribute, member in vars(value).items():
                    if type(member) in (FunctionType, property, classmethod, staticmethod):
                        yield f"{name}.{attribute}", value, attribute, member


def _named() -> list[str]:
    generated = ("__new__", "_make", "_replace", "_asdict", "__getnewargs__", "__repr__")
    skipped = (*generated, "__eq__", "__hash__", "__setattr__", "__delattr__", "__post_init__")
    found = [name for name, *_ in _functions() if not name.endswith(skipped)]
    return [name for name in dict.fromkeys(found) if name not in BOUNDARIES | OUTSIDE]


@pytest.mark.parametrize("name", _named())
def test_a_run_in_which_one_of_ours_raises_ends_as_the_hosts(
    xl: Pair, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From its first call on: nothing was forecast before."""
    expected = xl.sample(xl.model, steps=STEPS)
    ours = stepped(xl.model, speed=2.0)
    cache = cache_of(ours)
    for found, owner, attribute, member in _functions():
        if found == name:
            monkeypatch.setattr(owner, attribute, _raising(member))
            for module in MODULES:  # by whatever name it was imported
                other = importlib.import_module(f"warmgraph_backends.{module}")
                if vars(other).get(attribute) is member:
                    monkeypatch.setattr(other, attribute, _raising(member))
    with caplog.at_level(logging.WARNING):
        image = xl.sample(ours, steps=STEPS)
    assert cache.problem is not None and "OnPurposeError" in cache.problem, "it was not called"
    assert torch.equal(image, expected)
    warnings = [record for record in caplog.records if "Step Cache" in record.getMessage()]
    assert len(warnings) == 1 and warnings[0].exc_info
    monkeypatch.undo()
    xl.sample(ours, steps=STEPS)
    assert cache.problem is None and cache.evaluations["forecast"] > 0, "the next run is ours again"
