"""Whatever of DeepCache's own raises, the run ends as the host's, with one warning; what the host
raises passes through, once.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from warmgraph_backends.events import Event

from ..raising import OnPurposeError, make_raise, names_of
from .cached import Pair, cache_of, cached

MODULES = (
    *("caching.cache", "caching.patches", "caching.places", "caching.run", "caching.tally"),
    *("deepcache.branches", "deepcache.cache", "deepcache.calls", "deepcache.features"),
    *("deepcache.run", "deepcache.schedule"),
)
#: Where the host calls ours or ours the host: they tell whose an exception is.
BOUNDARIES = {
    "Branch.full",
    "Branch.shallow",
    "Cache.around_evaluation",
    "Cache.around_sampler",
    "Cache._guarded",
    "Cache._failed",
    "Cache._step_aside",
    "DeepCache.around_unet",
    "_ShiftedOptions.__setitem__",
    "_Source.forward",
    "_Tap.forward",
    "Before.restore",
    "alone",
}
#: Only for nodes and reports, or of schedules that the run here does not use.
OUTSIDE = {
    "depth",
    "Cache.__init__",
    "Cache._begin",
    "Cache._ended",
    "DeepCache.__init__",
    "Tally.__init__",
    "Tally.chunks",
    "Tally._times",
    "Tally.seconds_saved",
    "Tally.seconds_without",
    "_role",
    "Drift.__init__",
    "Drift.is_full",
    "quadratic",
    "custom",
    "_root",
    "Drift._is_far",
    "DeepCacheOptions.__init__",
    "CachedRun.let_go",
    "Places.keep_only",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if i % 4 else [])
        for i, n in enumerate(names_of(MODULES, BOUNDARIES | OUTSIDE))
    ],
)
def test_a_run_in_which_one_of_ours_raises_ends_as_the_hosts(
    sd15: Pair, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _host_image(sd15)
    ours = _patched(cached(sd15.model, interval=3))
    cache = cache_of(ours)
    cache.branch._layers = []  # so that it is cut anew
    make_raise(name, MODULES, monkeypatch)
    with caplog.at_level(logging.WARNING):
        image = sd15.sample(ours, steps=4)
    assert cache.problem is not None and "OnPurposeError" in cache.problem, "it was not called"
    assert torch.equal(image, expected)
    warnings = [record for record in caplog.records if "DeepCache" in record.getMessage()]
    assert len(warnings) == 1 and warnings[0].exc_info
    monkeypatch.undo()
    sd15.sample(ours, steps=4)
    assert cache.problem is None and cache.evaluations["shallow"] > 0, "the next run is ours again"


_images: dict[int, torch.Tensor] = {}


def _host_image(pair: Pair) -> torch.Tensor:
    if id(pair) not in _images:
        _images[id(pair)] = pair.sample(_patched(pair.model), steps=4)
    return _images[id(pair)]


def _patched(model: Any) -> Any:
    """A clone with a patch that changes nothing, so that patches are looked at."""
    clone = model.clone()
    clone.set_model_input_block_patch(lambda h, options: h)
    return clone


class _StopError(RuntimeError):
    pass


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("place", ["input", "output"])
def test_what_the_hosts_code_raises_passes_unchanged_and_is_not_run_twice(
    sd15: Pair, at: int, place: str
) -> None:
    """In a full call and in a shallow one."""
    from comfy.patcher_extension import WrappersMP

    ours = cached(sd15.model, interval=3)
    evaluation, raised, calls = -1, _StopError("theirs"), 0

    def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal evaluation
        evaluation += 1
        return executor(*args, **kwargs)

    def stop(h: torch.Tensor, *rest: Any) -> Any:
        nonlocal calls
        if evaluation == at:
            calls += 1
            raise raised
        return h if place == "input" else (h, rest[0])

    ours.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.stop", count)
    if place == "input":
        ours.set_model_input_block_patch(stop)
    else:
        ours.set_model_output_block_patch(stop)
    with pytest.raises(_StopError) as caught:
        sd15.sample(ours)
    assert caught.value is raised and raised.__cause__ is None and raised.__context__ is None
    assert calls == 1 and cache_of(ours).problem is None


def test_what_only_our_own_check_meets_fails_no_prompt(sd15: Pair) -> None:
    """The check runs the outer blocks once more than the host would."""
    ours = cached(sd15.model, interval=3)
    calls = 0

    def second(h: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        nonlocal calls
        calls += options["block"] == ("input", 0)
        if calls == 2:
            raise _StopError("in the check")
        return h

    ours.set_model_input_block_patch(second)
    assert torch.equal(sd15.sample(ours, steps=4), _host_image(sd15))
    assert "in the check" in (cache_of(ours).problem or "")


def test_a_cancel_in_our_own_check_cancels(sd15: Pair) -> None:
    import comfy.model_management as management

    ours = cached(sd15.model, interval=3)
    calls = 0

    def second(h: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        nonlocal calls
        calls += options["block"] == ("input", 0)
        if calls == 2:
            management.interrupt_current_processing(True)  # the host's next layer raises
        return h

    ours.set_model_input_block_patch(second)
    with pytest.raises(management.InterruptProcessingException):
        sd15.sample(ours)
    assert calls == 2


def test_whoever_listens_for_the_end_of_a_run_fails_no_prompt(
    sd15: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    ours = cached(sd15.model, interval=1)

    def raises() -> None:
        raise OnPurposeError

    cache_of(ours)._events.listen(raises, Event.RUN_ENDED)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(sd15.sample(ours), sd15.sample(sd15.model))
    assert any(record.exc_info for record in caplog.records)
