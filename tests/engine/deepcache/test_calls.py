"""DeepCache and the calls that a step is cut into: each keeps a feature of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.deepcache.features import shape_of
from warmgraph_backends.deepcache.schedule import Schedule

from .cached import Pair, cached, evaluations
from .sampling import SIZE, Trace, area, both, during


def _mask(pair: Pair, conditioning: Any, area: str) -> Any:
    mask = torch.zeros(1, 72, 88)
    mask[:, 8:, 40:] = 0.8
    return pair.node(
        "ConditioningSetMask",
        conditioning=conditioning,
        mask=mask,
        strength=0.9,
        set_cond_area=area,
    )


COMBINED: dict[str, tuple[Callable[[Pair], Any], int]] = {
    "tokens": (lambda p: p.prompt("a cat " * 60), 1),
    "many tokens": (lambda p: p.prompt("a cat " * 200), 2),
    "two of them": (lambda p: both(p, p.positive, p.prompt("a tree")), 1),
    "three of unequal length": (
        lambda p: both(p, both(p, p.prompt("a tree " * 60), p.prompt("a hill " * 200)), p.positive),
        1,
    ),
    "area": (lambda p: both(p, p.positive, area(p, p.prompt("a tree"))), 2),
    "areas of one size": (
        lambda p: both(
            p,
            both(p, area(p, p.prompt("a tree")), area(p, p.prompt("a sea"), x=48, y=24)),
            p.positive,
        ),
        2,
    ),
    "mask": (lambda p: both(p, p.positive, _mask(p, p.prompt("a tree"), "default")), 1),
    "mask bounds": (lambda p: both(p, p.positive, _mask(p, p.prompt("a tree"), "mask bounds")), 2),
    "default": (
        lambda p: p.node(
            "ConditioningSetDefaultCombine",
            cond=area(p, p.prompt("a tree")),
            cond_DEFAULT=p.prompt("a sea"),
        ),
        2,
    ),
}


#: What others of them are, too.
_WITHIN = ("many tokens", "two of them", "area", "mask")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in _WITHIN else []) for n in COMBINED]
)
def test_each_call_of_a_step_keeps_its_own(xl: Pair, name: str) -> None:
    make, calls = COMBINED[name]
    counts = xl.check(positive=make(xl), **SIZE)
    assert counts == {"full": 3 * calls, "shallow": 4 * calls}


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(2, 4, 8, 9)},
        {"x": torch.zeros(4, 4, 8, 8)},
        {"x": torch.zeros(2, 4, 8, 8, dtype=torch.float16)},
        {"x": torch.zeros(2, 4, 8, 8, device="meta")},
        {"context": torch.zeros(2, 154, 64)},
        {"y": None},
        {"control": {"output": [torch.zeros(1), None]}},
        {"options": {"uuids": ["b", "a"], "cond_or_uncond": [1, 0]}},
        {"options": {"uuids": ["a", "b"], "cond_or_uncond": [0, 1]}},
        {"options": {"uuids": ["a"], "cond_or_uncond": [1]}},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_no_other_call_is_taken_for_the_same(changes: dict[str, Any]) -> None:
    call: dict[str, Any] = {
        "x": torch.zeros(2, 4, 8, 8),
        "context": torch.zeros(2, 77, 64),
        "y": torch.zeros(2, 16),
        "control": {"output": [None, torch.zeros(1)]},
        "options": {"uuids": ["a", "b"], "cond_or_uncond": [1, 0]},
    }
    again = {**call, "x": torch.ones(2, 4, 8, 8), "control": {"output": [None, torch.ones(1)]}}
    assert shape_of(**again) == shape_of(**call)
    assert shape_of(**{**call, **changes}) != shape_of(**call)


def test_one_call_decides_for_all_of_an_adaptive_step(xl: Pair) -> None:
    """Calls of other areas see other latents, and cond and uncond apart the same one."""
    joined = both(xl, xl.prompt("a cat " * 200), area(xl, xl.prompt("a tree")))
    ours = cached(xl.model, schedule=Schedule.ADAPTIVE, threshold=0.4)
    sorts: list[Counter[str]] = []

    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        before = evaluations(ours)
        result = executor(*args, **kwargs)
        sorts.append(evaluations(ours) - before)
        return result

    ours.add_wrapper_with_key("predict_noise", "tests.sorts", around)
    xl.sample(ours, positive=joined, steps=10, **SIZE)
    assert all(len(made) == 1 for made in sorts)
    full = {n for n, made in enumerate(sorts) if "full" in made}
    assert 0 in full and 2 <= len(full) <= 8
    calls = {made.total() for made in sorts}
    assert len(calls) == 1 and calls.pop() > 2


def test_a_conditioning_that_comes_late_and_one_that_goes_take_full_calls(xl: Pair) -> None:
    late = during(xl, xl.prompt("a tree"), 0.3, 1.0)
    early = during(xl, xl.prompt("a sea"), 0.0, 0.55)
    sampling = {"positive": both(xl, both(xl, xl.positive, late), early), "steps": 10}
    trace = Trace()
    xl.sample(trace.attach(cached(xl.model, interval=10)), **sampling)
    sorts = [sort for event, sort in trace.events if event == "call"]
    assert sorts.count("full") == 3 and sorts[0] == "full"
    assert xl.check(full={0}, options={"interval": 10}, **sampling) == {"full": 3, "shallow": 7}


def test_what_was_not_there_at_the_last_full_step_takes_a_full_call(xl: Pair) -> None:
    """A conditioning is there for some steps around a full one; before and after, calls are of the
    same form, and what is kept from before is older than an interval.
    """
    some = during(xl, xl.prompt("a tree"), 0.25, 0.55)
    xl.check(positive=both(xl, xl.positive, some), steps=12, full={0, 3, 6, 9})


@pytest.mark.parametrize(
    "when",
    [
        range(2, 5),
        pytest.param(range(0, 12), marks=pytest.mark.slow),
        pytest.param(range(4, 12), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_host_short_of_memory_that_splits_calls(
    xl: Pair, when: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cond and uncond apart in some steps, which the host decides anew at each evaluation."""
    import comfy.model_management
    from comfy.patcher_extension import WrappersMP

    plenty, evaluation = comfy.model_management.get_free_memory, -1

    def free(*args: Any, **kwargs: Any) -> Any:
        found = plenty(*args, **kwargs)
        if evaluation not in when:
            return found
        return (1, 1) if isinstance(found, tuple) else 1

    def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal evaluation
        evaluation += 1
        monkeypatch.setattr(comfy.model_management, "get_free_memory", free)
        try:
            return executor(*args, **kwargs)
        finally:
            monkeypatch.setattr(comfy.model_management, "get_free_memory", plenty)

    def sample(model: Any) -> torch.Tensor:
        nonlocal evaluation
        evaluation = -1
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.memory", count)
        return xl.sample(clone, steps=12)

    counts = xl.check(sample=sample, full={0, 3, 6, 9})
    assert sum(counts.values()) == 12 + len(when)
