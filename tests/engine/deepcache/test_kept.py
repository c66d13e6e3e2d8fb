"""What DeepCache keeps, and for how long: nothing outlives its run."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from .cached import Pair, Reference, cache_of, cached
from .sampling import SIZE, area, both, during


def test_hires_over_an_upscaled_latent(xl: Pair) -> None:
    def sample(model: Any) -> torch.Tensor:
        first = {"samples": xl.sample(model, width=64, height=72)}
        larger = xl.node(
            "LatentUpscale",
            samples=first,
            upscale_method="nearest-exact",
            width=104,
            height=88,
            crop="disabled",
        )
        return xl.sample(model, latent=larger, denoise=0.5, sampler="dpmpp_2m_sde")

    assert xl.check(sample=sample) == {"full": 6, "shallow": 8}


def test_two_samplers_of_one_prompt(xl: Pair) -> None:
    """Of one size, with the very conditioning: only the run is another."""

    def sample(model: Any) -> torch.Tensor:
        first, second = (xl.sample(model, seed=seed, steps=8) for seed in (3, 4))
        return torch.cat([first, second])

    assert xl.check(sample=sample) == {"full": 6, "shallow": 10}


def test_clones_of_other_settings_by_turns(xl: Pair) -> None:
    settings: list[tuple[dict[str, Any], set[int]]] = [
        ({"interval": 2}, {0, 2, 4, 6}),
        ({"interval": 3, "branch": 2}, {0, 3, 6}),
        ({"interval": 5}, {0, 5}),
    ]
    models = [cached(xl.model, **options) for options, _ in settings]
    models[1] = models[1].clone()  # as every node behind makes one
    for seed in (1, 2):
        for ours, (options, full) in zip(models, settings, strict=True):
            reference = Reference(full, branch=options.get("branch", 0)).attach(xl.model)
            assert torch.equal(xl.sample(ours, seed=seed), xl.sample(reference, seed=seed))
        assert torch.equal(xl.sample(cached(xl.model, interval=1)), xl.sample(xl.model))


class Watch:
    """Weak references to every feature that a DeepCache keeps while it samples."""

    def __init__(self) -> None:
        self.features: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def attach(self, model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        cache = cache_of(model)

        def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return executor(*args, **kwargs)
            finally:
                assert cache._run is not None
                kept = list(cache._run.kept)
                self.features += [weakref.ref(each) for each in kept]
                self.most = max(self.most, len(kept))

        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.watch", around)
        return clone

    @property
    def alive(self) -> int:
        return sum(feature() is not None for feature in self.features)


@pytest.fixture
def no_collection() -> Any:
    """Memory must go with the last reference, not whenever Python looks for cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_no_feature_outlives_its_run(xl: Pair, no_collection: None) -> None:
    watch = Watch()
    ours = watch.attach(cached(xl.model, interval=3))
    positive = both(xl, xl.positive, area(xl, xl.prompt("a tree")))
    tensors = []
    for _ in range(2):
        xl.sample(ours, positive=positive, **SIZE)
        assert watch.most == 2 and len(watch.features) > 4
        assert watch.alive == 0
        tensors.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert tensors[0] == tensors[1]


def test_no_more_features_are_kept_than_a_step_has_calls(xl: Pair) -> None:
    """Conditioning that comes and goes leaves calls behind that nobody makes any more."""
    positive = xl.positive
    for n in range(1, 6):
        positive = both(xl, positive, during(xl, xl.prompt(f"tree {n}"), 0.16 * n, 0.16 * n + 0.1))
    watch = Watch()
    xl.sample(watch.attach(cached(xl.model, interval=2)), positive=positive, steps=20)
    assert watch.most <= 2  # the form of this step's call, and one that the last full step had


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("how", ["interrupt", "error"])
def test_what_stops_a_run_leaves_nothing(
    xl: Pair, how: str, at: int, no_collection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a shallow call and of a full one."""
    import comfy.model_management as management
    from comfy.patcher_extension import WrappersMP

    expected = xl.sample(Reference().attach(xl.model))
    ours = cached(xl.model, interval=3)
    watch, evaluation = Watch(), -1

    def stop(h: torch.Tensor, options: Any) -> torch.Tensor:
        if evaluation == at and options["block"][1] == 0:
            if how == "error":
                raise RuntimeError("on purpose")
            management.interrupt_current_processing(True)  # the host's next layer raises
        return h

    def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal evaluation
        evaluation += 1
        return executor(*args, **kwargs)

    stopped = watch.attach(ours)
    stopped.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.stop", count)
    stopped.set_model_input_block_patch(stop)
    error = RuntimeError if how == "error" else management.InterruptProcessingException
    with pytest.raises(error):
        xl.sample(stopped)
    assert evaluation == at and watch.features
    gc.collect()  # an exception's frames
    assert watch.alive == 0
    cache = cache_of(ours)
    assert cache._run is None
    assert cache.branch._tap.feature is None and cache.branch._source.feature is None
    assert torch.equal(xl.sample(ours), expected)


def test_unloaded_between_runs(xl: Pair) -> None:
    ours = cached(xl.model, interval=3)
    expected = xl.sample(Reference().attach(xl.model))
    for _ in range(2):
        assert torch.equal(xl.sample(ours), expected)
        xl.host.unload()
    xl.sample(xl.model)
    assert torch.equal(xl.sample(ours), expected)


def test_a_model_that_is_gone_takes_its_cache_with_it(xl: Pair) -> None:
    ours = cached(xl.model, interval=3)
    xl.sample(ours)
    cache = weakref.ref(cache_of(ours))
    del ours
    gc.collect()
    assert cache() is None


def test_one_models_trouble_is_not_anothers(xl: Pair) -> None:
    """A patch that no outer block can follow turns DeepCache off where the patch is, no further."""
    ours = cached(xl.model, interval=3)
    expected = xl.sample(Reference().attach(xl.model))
    unsteady = ours.clone()
    calls = 0

    def drifts(h: torch.Tensor, options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return h * (1 + calls * 1e-3)

    unsteady.set_model_input_block_patch(drifts)
    xl.sample(unsteady)
    assert torch.equal(xl.sample(ours), expected)
