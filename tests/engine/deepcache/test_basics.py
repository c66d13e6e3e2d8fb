"""DeepCache's sizes, branches, schedules and reports through the real KSampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.attaching.deepcache import apply, carried
from warmgraph_backends.deepcache.branches import Branch, depth
from warmgraph_backends.deepcache.run import DeepCacheOptions
from warmgraph_backends.deepcache.schedule import Drift, Schedule
from warmgraph_backends.deepcache.shares import shares
from warmgraph_backends.errors import RequirementError
from warmgraph_backends.events import Events
from warmgraph_backends.sessions.cache_reports import deepcache_report

from .cached import Pair, Reference, cache_of, cached, evaluations

SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=["narrowxl", "narrow15"])
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


#: Branches, and sizes of latents in pixels.
USUAL = ((0, (72, 96)), (1, (40, 200)), (11, (72, 96)))
SIZES = ((72, 96), (40, 200), (64, 64), (104, 88))
CASES = [
    pytest.param(branch, size, marks=[] if (branch, size) in USUAL else SLOW, id=f"{branch}-{size}")
    for branch in (0, 1, 11)
    for size in SIZES
]


@pytest.mark.parametrize(("branch", "size"), CASES)
def test_every_size_and_branch_equals_the_reference(
    pair: Pair, size: tuple[int, int], branch: int
) -> None:
    height, width = size
    deepest = depth(pair.unet) - 1
    reference = Reference(branch=min(branch, deepest))
    expected = pair.sample(reference.attach(pair.model), width=width, height=height)
    ours = cached(pair.model, interval=3, branch=branch)
    assert torch.equal(pair.sample(ours, width=width, height=height), expected)
    assert evaluations(ours) == reference.counts == {"full": 3, "shallow": 4}
    assert not torch.equal(expected, pair.sample(pair.model, width=width, height=height))


@pytest.mark.parametrize(
    "size",
    [(720, 960), *(pytest.param(s, marks=SLOW) for s in ((520, 328), (512, 512), (1000, 1024)))],
    ids=str,
)
def test_sizes_of_images_equal_the_reference(xl: Pair, size: tuple[int, int]) -> None:
    """720x960 is where others fail: 45 rows meet 46 on the way up."""
    given = {"width": size[0], "height": size[1], "steps": 4}
    reference = Reference({0, 3}, branch=2).attach(xl.model)
    expected = xl.sample(reference, **given)
    assert torch.equal(xl.sample(cached(xl.model, branch=2), **given), expected)


@pytest.mark.parametrize("batch", [1, 3, *(pytest.param(n, marks=SLOW) for n in (2, 4))])
def test_any_batch_equals_the_reference(xl: Pair, batch: int) -> None:
    found = xl.sample(cached(xl.model, interval=2), batch=batch)
    reference = Reference({0, 2, 4, 6}).attach(xl.model)
    assert torch.equal(found, xl.sample(reference, batch=batch))


@pytest.mark.parametrize(
    ("options", "full"),
    [
        ({"schedule": Schedule.CUSTOM, "full_steps": (0, 1, 4)}, {0, 1, 4}),
        ({"schedule": Schedule.CUSTOM, "full_steps": (3,)}, {0, 3}),
        ({"interval": 10}, {0}),
    ],
    ids=str,
)
def test_schedules_equal_the_reference(xl: Pair, options: dict[str, Any], full: set[int]) -> None:
    found = xl.sample(cached(xl.model, **options))
    assert torch.equal(found, xl.sample(Reference(full).attach(xl.model)))


def test_adaptive_equals_the_reference_of_the_steps_that_it_chose(xl: Pair) -> None:
    ours = cached(xl.model, schedule=Schedule.ADAPTIVE, threshold=0.5)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((x.clone(), args[-1]["sigmas"]))
        return executor(x, *args, **kwargs)

    plain = xl.model.clone()
    plain.add_wrapper_with_key("diffusion_model", "note", note)
    xl.sample(plain, steps=10)
    found = xl.sample(ours, steps=10)
    counts = evaluations(ours)
    assert counts["full"] > 2 and counts["shallow"] > 2 and sum(counts.values()) == len(seen) == 10
    # With random weights the latent of the plain run drifts as that of ours, but for rounding.
    drift = Drift(0.5)
    full = {step for step, call in enumerate(seen) if drift.is_full(step, *call)}
    assert torch.equal(found, xl.sample(Reference(full).attach(xl.model), steps=10))
    never = cached(xl.model, schedule=Schedule.ADAPTIVE, threshold=0.0)
    assert torch.equal(xl.sample(never), xl.sample(xl.model))


def test_only_the_chosen_part_of_a_run_is_shallow(xl: Pair) -> None:
    ours = cached(xl.model, interval=3, start_percent=0.3, end_percent=0.8)
    xl.sample(ours, steps=10)
    counts = evaluations(ours)
    assert 0 < counts["shallow"] < 6 and counts["full"] + counts["shallow"] == 10
    never = cached(xl.model, interval=3, start_percent=1.0)
    assert torch.equal(xl.sample(never), xl.sample(xl.model))


def test_a_model_without_a_unet_is_unchanged_and_says_so(xl: Pair) -> None:
    class Transformer(torch.nn.Module):
        pass

    before = xl.model.model.diffusion_model
    xl.model.model.diffusion_model = Transformer()
    try:
        with pytest.raises(RequirementError, match=r"Transformer.*Step Cache"):
            apply(xl.model, DeepCacheOptions(), Events(), identifier="deepcache")
    finally:
        xl.model.model.diffusion_model = before
    assert carried(xl.model) is None


@pytest.mark.parametrize("schedule", [Schedule.UNIFORM, Schedule.QUADRATIC], ids=str)
def test_interval_one_is_the_run_without_it(xl: Pair, schedule: Schedule) -> None:
    ours = cached(xl.model, interval=1, schedule=schedule)
    assert torch.equal(xl.sample(ours, steps=9), xl.sample(xl.model, steps=9))
    assert evaluations(ours) == {"full": 9}


def test_the_node_below_is_replaced_and_the_model_is_left_alone(xl: Pair) -> None:
    once = cached(xl.model, interval=2)
    twice = cached(once, interval=1)
    assert torch.equal(xl.sample(twice), xl.sample(xl.model))
    assert evaluations(once) == {}
    assert carried(xl.model) is None


@pytest.mark.parametrize("kind", ["narrowxl", pytest.param("narrow15", marks=SLOW)])
def test_shares_are_those_that_pytorch_counts(pairs: dict[str, Pair], kind: str) -> None:
    """At the size that is counted for; a shallow call's arithmetic as part of a whole one's."""
    pair = pairs[kind]
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # not known to it

    def attended(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    unet = pair.model.model.diffusion_model
    side = 64 if unet.num_classes is None else 128
    x, context = torch.randn(1, 4, side, side), pair.positive[0][0]
    y = None if unet.num_classes is None else torch.randn(1, 64 + 6 * 256)
    options: dict[str, Any] = {"transformer_options": {}}

    def count(call: Callable[..., Any], **given: Any) -> tuple[Any, int]:
        counter = FlopCounterMode(display=False, custom_mapping={attention: attended})
        with counter, torch.inference_mode():
            result = call(x, torch.tensor([500.0]), context.float(), y, None, **options, **given)
        return result, counter.get_total_flops()

    costs = shares(unet)
    assert len(costs) == depth(unet) and costs == sorted(costs) and costs[-1] < 1
    for number in (0, 2, depth(unet) - 1):
        branch = Branch(unet, number)
        (_, feature), whole = count(branch.full)
        _, outer = count(branch.shallow, feature=feature)
        assert costs[number] == pytest.approx(outer / whole, abs=0.02)


@pytest.mark.parametrize("name", ["EasyCacheNode", "LazyCacheNode"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_the_hosts_own_step_cache_it_steps_aside_and_says_so(
    xl: Pair, name: str, ours_first: bool
) -> None:
    from comfy_extras import nodes_easycache

    def other(model: Any) -> Any:
        node = getattr(nodes_easycache, name)
        return node.execute(model, 0.3, 0.1, 0.95, False).args[0]

    expected = xl.sample(other(xl.model), steps=10)
    ours = other(cached(xl.model)) if ours_first else cached(other(xl.model))
    assert torch.equal(xl.sample(ours, steps=10), expected)
    cache = cache_of(ours)
    assert cache.problem is not None and "EasyCache" in cache.problem
    assert cache.evaluations["shallow"] == 0
    assert "not used" in deepcache_report(cache)["text"]


def test_a_report_counts_each_conditioning_and_what_was_saved(xl: Pair) -> None:
    ours = cached(xl.model, interval=3)
    cache = cache_of(ours)
    assert "once a run has ended" in deepcache_report(cache)["text"]
    long = xl.host.encode(xl.clip, "a cat " * 200)
    xl.sample(ours, positive=long, width=256, height=256)
    report = deepcache_report(cache)
    assert sorted(chunk["role"] for chunk in report["chunks"]) == ["negative", "positive"]
    assert all((c["full"], c["shallow"]) == (3, 4) for c in report["chunks"])
    # Features of both, kept at once: 64 channels at 32x32, 4 bytes each.
    assert report["vram_bytes"] == 2 * 64 * 32 * 32 * 4
    assert report["seconds_saved"] > 0
    assert "3 full + 4 shallow steps" in report["text"] and "s saved" in report["text"]
    assert cache._run is None, "nothing but counts is kept"
