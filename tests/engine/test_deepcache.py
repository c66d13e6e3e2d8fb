"""DeepCache through the real KSampler, against a plain reference: compute all, and put the kept
feature in place of the deep one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.attach.deepcache import apply, kept
from warmgraph_backends.deepcache.branches import Branch, depth
from warmgraph_backends.deepcache.run import Options
from warmgraph_backends.deepcache.schedule import Drift, Schedule
from warmgraph_backends.deepcache.shares import shares
from warmgraph_backends.report import deepcache_report, deepcache_text
from warmgraph_tools.inprocess import Host

Patch = Callable[[Any], Any]
STEPS = 7


class Pair:
    """A checkpoint and two prompts of different length."""

    def __init__(self, host: Host, kind: str) -> None:
        self.host = host
        self.model, self.clip, _ = host.load(kind)
        self.positive = host.encode(self.clip, "a cat on a hill")
        self.negative = host.encode(self.clip, "blurry")

    def sample(self, model: Any, **options: Any) -> torch.Tensor:
        given = {"positive": self.positive, "negative": self.negative, "steps": STEPS, **options}
        image: torch.Tensor = self.host.sample(model, **given)
        assert image.isfinite().all()
        return image


@pytest.fixture(scope="module", params=["narrowxl", "narrow15"])
def pair(request: pytest.FixtureRequest, host: Host) -> Pair:
    return Pair(host, request.param)


@pytest.fixture(scope="module")
def xl(host: Host) -> Pair:
    return Pair(host, "narrowxl")


def _cached(model: Any, **options: Any) -> Any:
    clone, problem = apply(model, Options(**options))
    assert problem is None
    return clone


def _reference(model: Any, full: set[int], branch: int, *, per_step: int = 1) -> Any:
    """A clone that computes the whole UNet at every step; at steps that are not full ones, what
    goes into the last `branch + 1` output blocks is what went in at the last full one.

    Args:
        per_step: evaluations of each chunk in a step.
    """
    blocks = len(model.model.diffusion_model.output_blocks)
    features: dict[Any, torch.Tensor] = {}
    calls: dict[Any, int] = {}

    def patch(h: torch.Tensor, skip: torch.Tensor, options: dict[str, Any]) -> Any:
        if options["block"] != ("output", blocks - branch - 1):
            return h, skip
        key = (tuple(options["uuids"]), tuple(options["cond_or_uncond"]))
        step = calls.get(key, 0) // per_step
        calls[key] = calls.get(key, 0) + 1
        if step in full:
            features[key] = h.clone()
        return features[key].clone(), skip

    clone = model.clone()
    clone.set_model_output_block_patch(patch)
    return clone


@pytest.mark.parametrize("size", [(64, 64), (72, 96), (104, 88), (40, 200)], ids=str)
@pytest.mark.parametrize("branch", [0, 1, 11])
def test_every_size_and_branch_equals_the_reference(
    pair: Pair, size: tuple[int, int], branch: int
) -> None:
    height, width = size
    deepest = depth(pair.model.model.diffusion_model) - 1
    ours = _cached(pair.model, interval=3, branch=branch)
    branch = min(branch, deepest)
    found = pair.sample(ours, width=width, height=height)
    expected = pair.sample(_reference(pair.model, {0, 3, 6}, branch), width=width, height=height)
    assert torch.equal(found, expected)
    assert not torch.equal(found, pair.sample(pair.model, width=width, height=height))
    assert kept(ours).evaluations == {"full": 3, "shallow": 4}  # type: ignore[union-attr]


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_any_batch_equals_the_reference(xl: Pair, batch: int) -> None:
    found = xl.sample(_cached(xl.model, interval=2), batch=batch)
    assert torch.equal(found, xl.sample(_reference(xl.model, {0, 2, 4, 6}, 0), batch=batch))


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpm_2", "dpmpp_2m_sde", "uni_pc", "lcm"])
def test_interval_one_changes_nothing(pair: Pair, sampler: str) -> None:
    ours = _cached(pair.model, interval=1)
    found, expected = (pair.sample(m, sampler=sampler) for m in (ours, pair.model))
    assert torch.equal(found, expected)
    assert kept(ours).evaluations["shallow"] == 0  # type: ignore[union-attr]


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
    found = xl.sample(_cached(xl.model, **options))
    assert torch.equal(found, xl.sample(_reference(xl.model, full, 0)))


def test_adaptive_equals_the_reference_of_the_steps_that_it_chose(xl: Pair) -> None:
    ours = _cached(xl.model, schedule=Schedule.ADAPTIVE, threshold=0.5)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((x.clone(), args[-1]["sigmas"]))
        return executor(x, *args, **kwargs)

    plain = xl.model.clone()
    plain.add_wrapper_with_key("diffusion_model", "note", note)
    xl.sample(plain, steps=10)
    found = xl.sample(ours, steps=10)
    counts = dict(kept(ours).evaluations)  # type: ignore[union-attr]
    assert counts["full"] > 2 and counts["shallow"] > 2 and sum(counts.values()) == len(seen) == 10
    # With random weights the latent of the plain run drifts as that of ours, but for rounding.
    drift = Drift(0.5)
    full = {step for step, call in enumerate(seen) if drift.is_full(step, *call)}
    assert torch.equal(found, xl.sample(_reference(xl.model, full, 0), steps=10))
    never = _cached(xl.model, schedule=Schedule.ADAPTIVE, threshold=0.0)
    assert torch.equal(xl.sample(never), xl.sample(xl.model))


def test_only_the_chosen_part_of_a_run_is_shallow(xl: Pair) -> None:
    ours = _cached(xl.model, interval=3, start_percent=0.3, end_percent=0.8)
    xl.sample(ours, steps=10)
    counts = kept(ours).evaluations  # type: ignore[union-attr]
    assert 0 < counts["shallow"] < 6 and counts["full"] + counts["shallow"] == 10
    never = _cached(xl.model, interval=3, start_percent=1.0)
    assert torch.equal(xl.sample(never), xl.sample(xl.model))


def test_cond_and_uncond_apart_keep_features_of_their_own(xl: Pair) -> None:
    """Prompts of very different length run in calls of their own, one after the other."""
    long = xl.host.encode(xl.clip, "a cat " * 200)
    ours = _cached(xl.model, interval=3)
    found = xl.sample(ours, positive=long)
    assert torch.equal(found, xl.sample(_reference(xl.model, {0, 3, 6}, 0), positive=long))
    assert sum(kept(ours).evaluations.values()) == 2 * STEPS  # type: ignore[union-attr]


@pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpmpp_sde"])
def test_a_second_evaluation_is_of_its_steps_sort(xl: Pair, sampler: str) -> None:
    ours = _cached(xl.model, interval=2)
    xl.sample(ours, sampler=sampler, steps=6)
    counts = dict(kept(ours).evaluations)  # type: ignore[union-attr]
    assert counts["full"] >= 5 and counts["shallow"] >= 5
    assert abs(counts["full"] - counts["shallow"]) <= 2


def test_image_to_image_and_few_steps(xl: Pair) -> None:
    latent = {"samples": torch.randn(1, 4, 9, 11)}
    ours = _cached(xl.model, interval=3)
    for options in ({"denoise": 0.5}, {"steps": 1}, {"steps": 4, "sampler": "lcm", "cfg": 1.0}):
        before = sum(kept(ours).evaluations.values())  # type: ignore[union-attr]
        xl.sample(ours, latent=latent, **options)
        made = sum(kept(ours).evaluations.values()) - before  # type: ignore[union-attr]
        assert made == options.get("steps", STEPS)


def test_nothing_outlives_a_run(xl: Pair) -> None:
    """A second sampler on the same model begins anew, also after an interrupt in the middle."""
    ours = _cached(xl.model, interval=3)
    expected = xl.sample(_reference(xl.model, {0, 3, 6}, 0), seed=5)
    xl.sample(ours, seed=4)
    assert torch.equal(xl.sample(ours, seed=5), expected)
    cache = kept(ours)
    assert cache is not None and cache._run is None

    class Stop(BaseException):
        pass

    def stops(h: torch.Tensor, skip: torch.Tensor, options: Any) -> Any:
        if len(options["sample_sigmas"]) and cache.evaluations["shallow"] > before:
            raise Stop
        return h, skip

    before = cache.evaluations["shallow"] + 1
    stopped = ours.clone()
    stopped.set_model_output_block_patch(stops)
    with pytest.raises(Stop):
        xl.sample(stopped, seed=4)
    assert cache._run is None
    assert torch.equal(xl.sample(ours, seed=5), expected)


def _free_u(model: Any) -> Any:
    from comfy_extras.nodes_freelunch import FreeU_V2

    return FreeU_V2.execute(model, 1.3, 1.4, 0.9, 0.2).args[0]


def _hyper_tile(model: Any) -> Any:
    from comfy_extras.nodes_hypertile import HyperTile

    return HyperTile.execute(model, 64, 2, 0, False).args[0]


@pytest.mark.parametrize("patch", [_free_u], ids=lambda patch: patch.__name__)
def test_patches_of_others_act_in_both_orders(xl: Pair, patch: Patch) -> None:
    expected = xl.sample(_reference(patch(xl.model), {0, 3, 6}, 0))
    for ours in (_cached(patch(xl.model), interval=3), patch(_cached(xl.model, interval=3))):
        cache = kept(ours)
        assert cache is not None
        found = xl.sample(ours)
        assert cache.problem is None and cache.evaluations["shallow"] >= 4
        assert found.shape == expected.shape


def test_a_model_without_a_unet_is_unchanged_and_says_so(xl: Pair) -> None:
    class Transformer(torch.nn.Module):
        pass

    before = xl.model.model.diffusion_model
    xl.model.model.diffusion_model = Transformer()
    try:
        same, problem = apply(xl.model, Options())
    finally:
        xl.model.model.diffusion_model = before
    assert same is xl.model and problem is not None
    assert "Transformer" in problem and "EasyCache" in problem


def test_the_node_below_is_replaced_and_the_model_is_left_alone(xl: Pair) -> None:
    once = _cached(xl.model, interval=2)
    twice = _cached(once, interval=1)
    assert torch.equal(xl.sample(twice), xl.sample(xl.model))
    assert kept(once).evaluations == {}  # type: ignore[union-attr]
    assert kept(xl.model) is None


def test_shares_are_those_that_pytorch_counts(pair: Pair) -> None:
    """At the size that is counted for; a shallow call's arithmetic as part of a whole one's."""
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
    ours = other(_cached(xl.model)) if ours_first else _cached(other(xl.model))
    assert torch.equal(xl.sample(ours, steps=10), expected)
    cache = kept(ours)
    assert cache is not None and cache.problem is not None and "EasyCache" in cache.problem
    assert cache.evaluations["shallow"] == 0
    assert "steps aside" in deepcache_text(deepcache_report(cache))


def test_a_report_counts_each_conditioning_and_what_was_saved(xl: Pair) -> None:
    ours = _cached(xl.model, interval=3)
    cache = kept(ours)
    assert cache is not None
    assert "nothing sampled yet" in deepcache_text(deepcache_report(cache))
    long = xl.host.encode(xl.clip, "a cat " * 200)
    xl.sample(ours, positive=long, width=256, height=256)
    report = deepcache_report(cache)
    assert sorted(chunk["role"] for chunk in report["chunks"]) == ["negative", "positive"]
    assert all((c["full"], c["shallow"]) == (3, 4) for c in report["chunks"])
    # Features of both, kept at once: 64 channels at 32x32, 4 bytes each.
    assert report["vram_bytes"] == 2 * 64 * 32 * 32 * 4
    assert report["seconds_saved"] > 0
    text = deepcache_text(report)
    assert "positive 3 full + 4 shallow" in text and "s saved" in text
    assert cache._run is None, "nothing but counts is kept"
