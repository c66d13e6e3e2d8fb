"""A model under Step Cache beside a plain reference, which in steps that are not computed gives on
what a line through those before says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from warmgraph_backends.attaching.stepcache import apply, carried
from warmgraph_backends.events import Events
from warmgraph_backends.stepcache.cache import StepCache
from warmgraph_backends.stepcache.run import StepCacheOptions
from warmgraph_backends.stepcache.schedule import Schedule

from ..deepcache.cached import Pair, Patch, unpatched

STEPS = 12
#: Computed of twelve steps; forecasts are one and two steps apart, and long.
FULL = frozenset({0, 1, 2, 4, 7, 8, 11})
_KEY = "tests.reference"


def stepped(model: Any, full: Collection[int] = FULL, **options: Any) -> Any:
    """A clone under Step Cache, by a schedule of its own if none is named."""
    if "speed" not in options:
        given = tuple(sorted(full))
        options = {"schedule": Schedule.CUSTOM, "full_steps": given, "first_full": 2, **options}
    clone, _ = apply(model, StepCacheOptions(**options), Events(), identifier="stepcache")
    return clone


def cache_of(model: Any) -> StepCache:
    """The Step Cache that a model carries."""
    cache = carried(model)
    assert cache is not None
    return cache


def evaluations(model: Any) -> Counter[str]:
    """Calls by sort, of a Step Cache that did not step aside."""
    cache = cache_of(model)
    assert cache.problem is None, cache.problem
    return Counter(cache.evaluations)


class Reads(TorchFunctionMode):
    """What a Step Cache's own code reads of tensors, which on a GPU would wait for it.

    Attributes:
        found: by the methods' names, in order.
        runs: sampler runs that began.
    """

    _WAIT = (
        *("item", "tolist", "cpu", "numpy", "equal", "allclose", "is_nonzero"),
        *("nonzero", "argwhere", "unique", "masked_select"),
        *("__bool__", "__float__", "__int__", "__index__", "__contains__"),
    )

    def __init__(self, model: Any) -> None:
        """Watch the Step Cache that a model carries, from now on."""
        super().__init__()
        self.found: list[str] = []
        self.runs = 0
        cache: Any = cache_of(model)
        guarded = cache._guarded  # all that is its own is called so

        def watched(ours: Callable[..., Any], *args: Any) -> Any:
            self.runs += ours == cache._begin
            with self:
                return guarded(ours, *args)

        cache._guarded = watched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self._WAIT:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Reference:
    """In steps that are not full ones it gives on a forecast by what it computed in the last two
    full ones, where there were two since something began or ended; else it computes.

    Attributes:
        sorts: of all calls, in order: "full", "forecast".
    """

    def __init__(
        self,
        full: Collection[int] = FULL,
        *,
        share: float | None = None,
        is_flow: bool = False,
        anew: Collection[int] = (),
        step_of: Sequence[int] | None = None,
    ) -> None:
        """Args: the full steps; how much of the line counts, None as is best; what sigma means;
        steps before which something begins or ends; and the step of each evaluation in turn, where
        that is not its number.
        """
        self.sorts: list[str] = []
        self._full, self._share, self._is_flow = full, share, is_flow
        self._anew, self._step_of = sorted(anew), step_of
        self._evaluation = -1

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.sorts)

    def attach(self, model: Any) -> Any:
        """Return a clone that runs as the reference; others' patches are to come on top of it."""
        from comfy.patcher_extension import WrappersMP

        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, _KEY, self._around_run)
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, _KEY, self._around_evaluation)
        clone.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, _KEY, self._around_batch)
        return clone

    def _around_run(self, executor: Any, *args: Any) -> Any:
        self._evaluation, self._last, self._made = -1, 0, {}
        return executor(*args)

    def _around_evaluation(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self._evaluation += 1
        self._calls: Counter[Any] = Counter()
        if self._step in self._full and self._step != self._last:
            # What the last full step did not ask for is of no call any more.
            self._made = {c: m for c, m in self._made.items() if max(m) >= self._last}
            self._last = self._step
        return executor(*args, **kwargs)

    @property
    def _step(self) -> int:
        return self._evaluation if self._step_of is None else self._step_of[self._evaluation]

    def _around_batch(
        self, executor: Any, model: Any, conds: Any, x: Any, sigma: Any, options: Any
    ) -> Any:
        step = self._step
        inner = options.get("transformer_options", {})
        window = tuple(getattr(inner.get("context_window"), "index_list", ()))
        patches = str(sorted(inner.get("patches_replace", {})))
        ids = tuple(None if c is None else tuple(each["uuid"] for each in c) for c in conds)
        call = (id(model), ids, window, tuple(x.shape), patches)
        self._calls[call] += 1
        made = self._made.get((call, self._calls[call]), {})
        since = max((each for each in self._anew if each <= step), default=0)
        known = [made[each] for each in sorted(made) if since <= each < step]
        s = sigma[:1].float().view(-1, *[1] * (x.dim() - 1))
        noise = s if self._is_flow else s / (1.0 + s)
        if step in self._full or step >= STEPS or len(known) < 2:
            self.sorts.append("full")
            seen = x.clone()
            given = executor(model, conds, x, sigma, options)
            now = (noise, [(seen - each) / s for each in given])
            # Of a step that is evaluated twice, the first one says how good the line was.
            made[step] = (now, made[step][1] if step in made else now)
            self._made[call, self._calls[call]] = made
            return given
        self.sorts.append("forecast")
        ((n0, v0), _), ((n1, v1), first) = known[-2:]
        far = _ahead(n0, n1, noise)
        shares = [0.5 if self._share is None else self._share] * len(v1)
        if self._share is None and len(known) > 2:
            shares = self._fitted(known[-3][0], (n0, v0), first)
        made_up = [x - s * (b + far * w * (b - a)) for a, b, w in zip(v0, v1, shares, strict=True)]
        return [
            torch.zeros_like(x) if c is None else m for c, m in zip(conds, made_up, strict=True)
        ]

    @staticmethod
    def _fitted(*known: Any) -> list[torch.Tensor]:
        """How much of a line's change would have been best for the last of three steps."""
        (n0, v0), (n1, v1), (n2, v2) = known
        found = []
        for a, b, c in zip(v0, v1, v2, strict=True):
            line = (b - a) * _ahead(n0, n1, n2)
            dims = tuple(range(1, line.dim()))
            along, long = (each.sum(dims, keepdim=True) for each in (line * (c - b), line.square()))
            found.append((along / torch.where(long == 0, 1.0, long)).clamp(0.5, 1.0))
        return found


def _ahead(n0: torch.Tensor, n1: torch.Tensor, n2: torch.Tensor) -> torch.Tensor:
    """How far it is from the second to the third, in ways from the first to the second."""
    return ((n2 - n1) / (n1 - n0)).clamp(0.0, 3.0) if n1 != n0 else torch.zeros_like(n2)


def check(
    pair: Pair,
    patch: Patch = unpatched,
    *,
    sample: Callable[..., torch.Tensor] | None = None,
    full: Collection[int] = FULL,
    reference: Reference | None = None,
    options: dict[str, Any] | None = None,
    **sampling: Any,
) -> Counter[str]:
    """Assert that a patched model under Step Cache samples what the patched reference samples, bit
    for bit, with Step Cache above and below the patch, by as many calls of each sort; and that with
    all steps computed its image is the plain one.

    Args:
        patch: what other nodes do to a MODEL; called anew for each of the models.
        sample: `sample(model, **sampling)`; KSampler if None.
        full, options: of Step Cache; `reference` makes the same full steps.

    Returns:
        How many calls there were of each sort.
    """
    sampling = {"steps": STEPS, **sampling}
    sample = sample or pair.sample
    reference = reference or Reference(full)
    plain = sample(patch(pair.model), **sampling)
    expected = sample(patch(reference.attach(pair.model)), **sampling)
    counts = reference.counts
    on_top = stepped(patch(pair.model), full, **(options or {}))
    below = () if patch is unpatched else (patch(stepped(pair.model, full, **(options or {}))),)
    for ours in (on_top, *below):
        reads = Reads(ours)
        found = sample(ours, **sampling)
        assert evaluations(ours) == counts
        assert reads.runs and reads.found == ["tolist"] * reads.runs
        assert torch.equal(found, expected)
    if counts["forecast"]:
        assert not torch.equal(expected, plain), "a reference that does not differ shows nothing"
    always = stepped(patch(pair.model), range(STEPS))
    assert torch.equal(sample(always, **sampling), plain)
    assert evaluations(always)["forecast"] == 0
    return counts
