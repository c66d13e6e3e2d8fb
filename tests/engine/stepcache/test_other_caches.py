"""Step Cache and DeepCache beside caches of other packs, hooked in as those hook in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from warmgraph_backends.attaching import deepcache
from warmgraph_backends.deepcache.run import DeepCacheOptions
from warmgraph_backends.events import Events
from warmgraph_tools.inprocess import Host

from ..deepcache.cached import Pair
from .small import Small
from .stepped import STEPS, cache_of, evaluations, stepped

Hook = Callable[[Any], Any]


def _skipping(forward: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    """A forward that gives every third time what it gave before, as they all do in the end."""
    cache_state: dict[str, Any] = {}

    def cached_forward(*args: Any, **kwargs: Any) -> Any:
        counts.append(1)
        if len(counts) % 3 == 0 and "last_result" in cache_state:
            return cache_state["last_result"]
        cache_state["last_result"] = forward(*args, **kwargs)
        return cache_state["last_result"]

    return cached_forward


def around_the_call(model: Any) -> Any:
    """As TeaCache and MagCache: a function around the model's call puts a forward in its place."""
    clone, counts = model.clone(), list[int]()
    root = clone.model.diffusion_model
    forward = _skipping(root.forward, counts)

    def unet_wrapper_function(model_function: Any, kwargs: dict[str, Any]) -> Any:
        kwargs["c"]["transformer_options"]["enable_teacache"] = True
        with patch.multiple(root, forward=forward):
            return model_function(kwargs["input"], kwargs["timestep"], **kwargs["c"])

    clone.set_model_unet_function_wrapper(unet_wrapper_function)
    return clone


def by_held_names(model: Any) -> Any:
    """As WaveSpeed: nothing but what the function closes over says what it does."""
    clone, counts = model.clone(), list[int]()
    root = clone.model.diffusion_model
    forward = _skipping(root.forward, counts)

    def ensure_cache_state(_: Any) -> None:
        pass

    def model_unet_function_wrapper(model_function: Any, kwargs: dict[str, Any]) -> Any:
        ensure_cache_state(kwargs["input"])
        with patch.object(root, "forward", forward):
            return model_function(kwargs["input"], kwargs["timestep"], **kwargs["c"])

    clone.set_model_unet_function_wrapper(model_unet_function_wrapper)
    return clone


def by_a_key(model: Any) -> Any:
    """As CacheDiT: a wrapper around the whole run puts a forward into the model."""
    from comfy.patcher_extension import WrappersMP

    clone = model.clone()

    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        root, counts = executor.class_obj.model_patcher.model.diffusion_model, list[int]()
        root.forward = _skipping(root.forward, counts)
        try:
            return executor(*args, **kwargs)
        finally:
            del root.forward

    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "cache_dit_turbo", around)
    return clone


HOOKS = [around_the_call, by_held_names, by_a_key]


@pytest.fixture(scope="module")
def flux(host: Host) -> Small:
    return Small(host, "flux1")


@pytest.mark.parametrize("order", ["before", "behind"])
@pytest.mark.parametrize("theirs", HOOKS)
def test_step_cache_leaves_the_run_to_it_and_says_whose_it_is(
    flux: Small, theirs: Hook, order: str
) -> None:
    expected = flux.sample(theirs(flux.model), steps=STEPS)
    assert not torch.equal(expected, flux.sample(flux.model, steps=STEPS)), "it skips nothing"
    ours = theirs(stepped(flux.model)) if order == "before" else stepped(theirs(flux.model))
    assert torch.equal(flux.sample(ours, steps=STEPS), expected)
    problem = cache_of(ours).problem
    assert problem is not None and problem.key == "other_cache"
    assert problem.values["owner"] == __name__.partition(".")[0]


@pytest.mark.parametrize("theirs", HOOKS)
def test_deepcache_does_likewise(xl: Pair, theirs: Hook) -> None:
    expected = xl.sample(theirs(xl.model), steps=STEPS)
    clone, cache = deepcache.apply(
        xl.model, DeepCacheOptions(interval=3), Events(), identifier="deepcache"
    )
    assert torch.equal(xl.sample(theirs(clone), steps=STEPS), expected)
    assert cache.problem is not None and cache.problem.key == "other_cache"
    assert not cache.evaluations


def test_what_only_gives_memory_back_is_no_cache(flux: Small) -> None:
    import comfy.model_management as management

    def around(model_function: Any, kwargs: dict[str, Any]) -> Any:
        management.soft_empty_cache()
        return model_function(kwargs["input"], kwargs["timestep"], **kwargs["c"])

    ours = stepped(flux.model)
    ours.set_model_unet_function_wrapper(around)
    flux.sample(ours, steps=STEPS)
    assert evaluations(ours)["forecast"] == 5
