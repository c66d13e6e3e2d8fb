"""A model under DeepCache beside a plain reference, which computes all and puts the kept feature in
place of the deep one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from warmgraph_backends.attaching.deepcache import apply, carried
from warmgraph_backends.deepcache.cache import DeepCache
from warmgraph_backends.deepcache.run import DeepCacheOptions
from warmgraph_backends.deepcache.schedule import Schedule
from warmgraph_backends.events import Events
from warmgraph_tools.inprocess import Host

from ..lab import Once

Patch = Callable[[Any], Any]

STEPS = 7
#: The full ones of seven steps, three apart.
THIRDS = frozenset({0, 3, 6})
#: What `Pair.check` counts then, with one call a step.
CALLS = {"full": 3, "shallow": 4}
#: Models, and where their UNets are cut: outer blocks with attention at both ends of one.
CUTS = [("narrow15", 0), ("narrowxl", 3)]
#: Under the host's key for wrappers.
_KEY = "tests.reference"


def by_turns(names: Collection[str], *, rarely: Collection[str] = ()) -> list[Any]:
    """Each name in one of the models by turns; in the others, too, and those that are meant for
    `rarely`, where all tests run.
    """
    often = [name for name in names if name not in rarely]
    turns = {name: number % len(CUTS) for number, name in enumerate(often)}
    return [
        pytest.param(*cut, name, marks=[] if turns.get(name) == turn else [pytest.mark.slow])
        for turn, cut in enumerate(CUTS)
        for name in names
    ]


def unpatched(model: Any) -> Any:
    """The patch that does nothing."""
    return model


def cached(model: Any, **options: Any) -> Any:
    """A clone under DeepCache, by the uniform schedule if none is named: its steps are plain."""
    chosen = DeepCacheOptions(**{"schedule": Schedule.UNIFORM, **options})
    clone, _ = apply(model, chosen, Events(), identifier="deepcache")
    return clone


def cache_of(model: Any) -> DeepCache:
    """The DeepCache that a model carries."""
    cache = carried(model)
    assert cache is not None
    return cache


def evaluations(model: Any) -> Counter[str]:
    """Calls of the UNet by sort, of a DeepCache that did not step aside."""
    cache = cache_of(model)
    assert cache.problem is None, cache.problem
    return Counter(cache.evaluations)


class Reference:
    """Computes the whole UNet at every evaluation. In steps that are not full ones, what goes into
    the last `branch + 1` output blocks is what went in at the last full one.

    A call that none in the last full step or since was like takes a full one, and is counted so.

    Attributes:
        sorts: of the UNet's calls, in order: "full", "shallow".
        is_full: the sort of the step that is being made.
    """

    def __init__(
        self,
        full: Collection[int] = THIRDS,
        *,
        branch: int = 0,
        step_of: Sequence[int] | None = None,
    ) -> None:
        """Args: the full steps; where the UNet is cut; and the step of each evaluation in turn,
        where that is not its number.
        """
        self.sorts: list[str] = []
        self.is_full = True
        self._full, self._branch, self._step_of = full, branch, step_of
        self._evaluation = -1
        self._calls: Counter[Any] = Counter()
        self._kept: dict[Any, tuple[int, torch.Tensor]] = {}

    @property
    def counts(self) -> Counter[str]:
        """Calls of the UNet by sort."""
        return Counter(self.sorts)

    def attach(self, model: Any) -> Any:
        """Return a clone that runs as the reference; others' patches are to come on top of it."""
        from comfy.patcher_extension import WrappersMP

        cut = len(model.model.diffusion_model.output_blocks) - self._branch - 1

        def patch(h: torch.Tensor, skip: torch.Tensor, options: dict[str, Any]) -> Any:
            return (self._exchange(h, options), skip) if options["block"][1] == cut else (h, skip)

        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, _KEY, self._around_run)
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, _KEY, self._around_evaluation)
        clone.set_model_output_block_patch(patch)
        return clone

    def _around_run(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self._evaluation = -1
        self._kept.clear()
        return executor(*args, **kwargs)

    def _around_evaluation(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self._evaluation += 1
        self._calls.clear()
        self.is_full = self._step in self._full
        return executor(*args, **kwargs)

    @property
    def _step(self) -> int:
        return self._evaluation if self._step_of is None else self._step_of[self._evaluation]

    def _exchange(self, h: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        chunks = tuple(options["uuids"]), tuple(options["cond_or_uncond"])
        window = tuple(getattr(options.get("context_window"), "index_list", ()))
        call = (chunks, tuple(options["original_shape"]), window)
        self._calls[call] += 1
        call = (call, self._calls[call])
        last_full = max(step for step in self._full if step <= self._step)
        made, feature = self._kept.get(call, (-1, h))
        is_full = self.is_full or made < last_full
        self.sorts.append("full" if is_full else "shallow")
        if is_full:
            self._kept[call] = (self._step, h.clone())
            return h
        return feature.clone()


class Pair:
    """A checkpoint and two prompts."""

    def __init__(self, host: Host, kind: str) -> None:
        self.host = host
        self.model, self.clip, _ = host.load(kind)
        self.positive = self.prompt("a cat on a hill")
        self.negative = self.prompt("blurry")
        #: The model's own image.
        self._bare = Once(lambda **sampling: self.sample(self.model, **sampling))

    @property
    def unet(self) -> Any:
        return self.model.model.diffusion_model

    def prompt(self, text: str) -> Any:
        return self.host.encode(self.clip, text)

    def node(self, class_type: str, **inputs: Any) -> Any:
        """The first output of a core node."""
        return self.host.node(class_type, **inputs)[0]

    def module_of(self, class_type: str) -> ModuleType:
        """The module of a core node; the host imports them under names of its own."""
        return sys.modules[self.host.nodes.NODE_CLASS_MAPPINGS[class_type].__module__]

    def patch(self, class_type: str, **widgets: Any) -> Patch:
        """The patch that a core node with a MODEL input and output makes."""
        return lambda model: self.node(class_type, model=model, **widgets)

    def sample(self, model: Any, **options: Any) -> torch.Tensor:
        """Sample with the random numbers that some patches draw pinned too."""
        torch.manual_seed(7)
        given = {"positive": self.positive, "negative": self.negative, "steps": STEPS, **options}
        image: torch.Tensor = self.host.sample(model, **given)
        assert image.isfinite().all()
        return image

    def check(
        self,
        patch: Patch = unpatched,
        *,
        sample: Callable[..., torch.Tensor] | None = None,
        full: Collection[int] = THIRDS,
        branch: int = 0,
        options: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Counter[str]:
        """Assert that a patched model under DeepCache samples what the patched reference samples,
        with DeepCache above and below the patch, by as many calls of each sort; that its image is
        not the plain one; and that with an interval of one it is, where others patch something.

        Args:
            patch: what other nodes do to a MODEL; called anew for each of the models.
            sample: `sample(model, **sampling)`; KSampler if None.
            full, branch: of the reference.
            options: of DeepCache, that it makes the same full steps; an interval of 3 by default.

        Returns:
            How many calls there were of each sort.
        """
        bare = self._bare if sample is None else partial(sample, self.model)
        sample = sample or self.sample
        plain = sample(patch(self.model), **sampling)
        if patch is not unpatched:
            assert not torch.equal(plain, bare(**sampling)), "the patch did nothing"
        reference = Reference(full, branch=branch)
        expected = sample(patch(reference.attach(self.model)), **sampling)
        assert not torch.equal(expected, plain), "a reference that does not differ shows nothing"
        options = {"branch": branch, "interval": 3, **(options or {})}
        on_top = cached(patch(self.model), **options)
        below = () if patch is unpatched else (patch(cached(self.model, **options)),)
        for ours in (on_top, *below):
            found = sample(ours, **sampling)
            assert evaluations(ours) == reference.counts
            assert torch.equal(found, expected)
        if patch is not unpatched:
            always = cached(patch(self.model), branch=branch, interval=1)
            assert torch.equal(sample(always, **sampling), plain)
            assert evaluations(always)["shallow"] == 0
        return reference.counts


def changed(act: Callable[[Any], None]) -> Patch:
    """The patch that does something to a clone."""

    def patch(model: Any) -> Any:
        clone = model.clone()
        act(clone)
        return clone

    return patch
