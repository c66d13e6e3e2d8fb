"""Step Cache makes the steps that are not computed from those before, bit for bit as a plain loop
over recorded steps does, and changes nothing where all are computed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.stepcache.run import StepCacheOptions

from ..deepcache.cached import Pair, changed
from ..deepcache.sampling import Trace, area, both, during, sample_custom, step_of
from .stepped import FULL, STEPS, Reference, cache_of, check, evaluations, stepped

CALLS = {"full": 7, "forecast": 5}


@pytest.mark.parametrize(
    ("forecast", "share"), [("auto", None), ("half", 0.5), ("line", 1.0), ("reuse", 0.0)]
)
def test_a_forecast_goes_on_along_the_line(xl: Pair, forecast: str, share: float | None) -> None:
    from warmgraph_backends.stepcache.forecast import Forecast

    options = {"forecast": Forecast(forecast)}
    assert check(xl, reference=Reference(share=share), options=options) == CALLS


@pytest.mark.parametrize(("batch", "width", "height"), [(1, 72, 88), (3, 64, 64), (2, 104, 40)])
def test_batches_and_sizes(xl: Pair, batch: int, width: int, height: int) -> None:
    assert check(xl, batch=batch, width=width, height=height) == CALLS


def test_without_guidance_there_is_no_negative(xl: Pair) -> None:
    assert check(xl, cfg=1.0) == CALLS


def test_img2img(xl: Pair) -> None:
    latent = {"samples": torch.full((1, 4, 8, 9), 0.3)}
    assert check(xl, latent=latent, denoise=0.6) == CALLS


def test_areas_and_masks(xl: Pair) -> None:
    placed = both(xl, xl.positive, area(xl, xl.prompt("a tree")))
    assert check(xl, positive=placed, width=88, height=72) == CALLS


def test_a_prompt_that_begins_or_ends_within_the_run_is_computed_anew(xl: Pair) -> None:
    """In its first step and in the one after: a line goes through what was computed with it."""
    early = during(xl, xl.prompt("a tree"), 0.0, 0.5)
    late = during(xl, xl.prompt("a house"), 0.5, 1.0)
    positive = both(xl, both(xl, xl.positive, early), late)
    step = step_of(xl, 0.5, STEPS)
    full = {0, 1, 2, 4, 11}
    anew = Reference({*full, step, step + 1}, anew={step})
    assert step not in full and step + 1 not in full
    counts = check(xl, full=full, reference=anew, positive=positive)
    assert counts == {"full": 7, "forecast": 5}


def test_two_samplers_in_a_prompt_share_nothing(xl: Pair) -> None:
    def sample(model: Any, **sampling: Any) -> torch.Tensor:
        first = xl.sample(model, **{**sampling, "seed": 3})
        latent = {"samples": first}
        return xl.sample(model, **{**sampling, "latent": latent, "denoise": 0.5})

    assert check(xl, sample=sample) == {"full": 14, "forecast": 10}


def test_speed_says_how_many_steps_are_computed(xl: Pair) -> None:
    ours = stepped(xl.model, speed=2.0)
    xl.sample(ours, steps=24)
    assert evaluations(ours) == {"full": 12, "forecast": 12}
    cache = cache_of(ours)
    assert (cache.steps, cache.computed, cache.forecast) == (24, 12, 12)


def test_at_speed_one_nothing_changes(xl: Pair) -> None:
    ours = stepped(xl.model, speed=1.0)
    assert torch.equal(xl.sample(ours, steps=STEPS), xl.sample(xl.model, steps=STEPS))
    assert not evaluations(ours)


def test_of_few_steps_none_is_left_out(xl: Pair) -> None:
    ours = stepped(xl.model, speed=2.0)
    assert torch.equal(xl.sample(ours, steps=8), xl.sample(xl.model, steps=8))
    assert "8 steps" in (cache_of(ours).problem or "") and not cache_of(ours).evaluations
    xl.sample(ours, steps=STEPS)
    assert cache_of(ours).problem is None and evaluations(ours)["forecast"] > 0


@pytest.mark.parametrize("name", ["EasyCacheNode", "LazyCacheNode"])
@pytest.mark.parametrize("order", ["before", "behind"])
def test_beside_the_hosts_step_caches_it_steps_aside(xl: Pair, name: str, order: str) -> None:
    from comfy_extras import nodes_easycache

    node = getattr(nodes_easycache, name)

    def theirs(model: Any) -> Any:
        return node.execute(model, 0.2, 0.15, 0.95, False).result[0]

    ours = theirs(stepped(xl.model)) if order == "before" else stepped(theirs(xl.model))
    assert torch.equal(xl.sample(ours, steps=STEPS), xl.sample(theirs(xl.model), steps=STEPS))
    assert "EasyCache" in (cache_of(ours).problem or "")


def test_beside_deepcache_it_steps_aside(xl: Pair) -> None:
    from ..deepcache.cached import cached

    ours = stepped(cached(xl.model, interval=3))
    found = xl.sample(ours, steps=STEPS)
    assert torch.equal(found, xl.sample(cached(xl.model, interval=3), steps=STEPS))
    assert "DeepCache" in (cache_of(ours).problem or "")


def test_a_part_of_the_run(xl: Pair) -> None:
    ours = stepped(xl.model, speed=4.0, start_percent=0.5)
    trace = Trace()
    xl.sample(trace.attach(ours), steps=STEPS)
    begin = step_of(xl, 0.5, STEPS)
    run = cache_of(ours)
    assert 0 < run.forecast <= STEPS - begin and run.computed >= begin


def test_rising_sigmas_reuse(xl: Pair) -> None:
    """There is no line ahead of them."""
    rising = torch.linspace(0.5, 6.0, STEPS + 1)
    found = [sample_custom(xl, stepped(model), sigmas=rising) for model in (xl.model, xl.model)]
    assert torch.equal(*found) and found[0].isfinite().all()


def test_conditionings_in_calls_of_their_own(xl: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the host makes them where memory is short."""
    import comfy.model_management as management

    together = xl.sample(stepped(xl.model), steps=STEPS)
    monkeypatch.setattr(management, "get_free_memory", lambda *_, **__: 1)
    ours = stepped(xl.model)
    apart = xl.sample(ours, steps=STEPS)
    assert evaluations(ours) == CALLS
    assert (apart - together).norm() <= 1e-4 * together.norm()


def test_an_exception_frees_all(xl: Pair) -> None:
    def stop(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if len(seen) == 4:
            raise RuntimeError("theirs")
        seen.append(1)
        return executor(*args, **kwargs)

    from comfy.patcher_extension import WrappersMP

    seen: list[int] = []
    ours = stepped(xl.model)
    ours.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "tests.stop", stop)
    with pytest.raises(RuntimeError, match="theirs"):
        xl.sample(ours, steps=STEPS)
    assert cache_of(ours)._run is None and cache_of(ours).problem is None


def test_two_clones_do_not_meet(xl: Pair) -> None:
    one, other = stepped(xl.model), stepped(xl.model, {0, 1, 11})
    first = xl.sample(one, steps=STEPS)
    xl.sample(other, steps=STEPS)
    assert torch.equal(xl.sample(one, steps=STEPS), first)
    clone = changed(lambda _: None)(one)
    assert torch.equal(xl.sample(clone, steps=STEPS), first)


def test_what_is_kept_is_two_latents_of_each_conditioning(xl: Pair) -> None:
    ours = stepped(xl.model)
    xl.sample(ours, steps=STEPS, width=64, height=64)
    assert cache_of(ours).kept_bytes == 2 * 2 * 4 * 8 * 8 * 4


def test_the_defaults_are_within_their_limits() -> None:
    options = StepCacheOptions()
    assert options.speed >= 1 and options.first_full >= 2 and set(range(STEPS)) >= FULL
