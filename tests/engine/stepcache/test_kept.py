"""What Step Cache keeps: no longer than a run, no more than its calls need, and nothing of it is
read from the device.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from warmgraph_backends.stepcache.forecast import Forecast

from ..deepcache.cached import Pair
from ..deepcache.sampling import both, during, step_of
from ..deepcache.test_control import _controlled, _net
from ..deepcache.test_wrappers import _behind
from .stepped import STEPS, Reads, Reference, cache_of, check, evaluations, stepped


class Watch:
    """Weak references to all that was kept, and how many calls had something at a time."""

    def __init__(self) -> None:
        self.kept: list[weakref.ref[torch.Tensor]] = []
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
                parts = [part for each in kept for part in (each.last, each.before) if part]
                tensors = [v for part in parts for v in part.velocities if v is not None]
                self.kept += map(weakref.ref, tensors)
                self.most = max(self.most, len(kept))

        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.watch", around)
        return clone

    @property
    def alive(self) -> int:
        return sum(each() is not None for each in self.kept)


def test_nothing_outlives_its_run(xl: Pair) -> None:
    gc.collect()
    gc.disable()
    try:
        watch = Watch()
        xl.sample(watch.attach(stepped(xl.model)), steps=STEPS)
        assert len(watch.kept) > 4 and watch.alive == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["interrupt", "error"])
def test_what_stops_a_run_leaves_nothing(xl: Pair, how: str) -> None:
    import comfy.model_management as management
    from comfy.patcher_extension import WrappersMP

    expected = xl.sample(stepped(xl.model), steps=STEPS)
    ours = stepped(xl.model)
    watch, calls = Watch(), 0

    def stop(executor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            if how == "error":
                raise RuntimeError("on purpose")
            management.interrupt_current_processing(True)
            management.throw_exception_if_processing_interrupted()
        return executor(*args, **kwargs)

    stopped = watch.attach(ours)
    stopped.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "tests.stop", stop)
    error = RuntimeError if how == "error" else management.InterruptProcessingException
    with pytest.raises(error):
        xl.sample(stopped, steps=STEPS)
    gc.collect()  # an exception's frames
    assert watch.kept and watch.alive == 0 and cache_of(ours)._run is None
    assert torch.equal(xl.sample(ours, steps=STEPS), expected)


def test_prompts_that_come_and_go_leave_nothing_behind(xl: Pair) -> None:
    positive = xl.positive
    for n in range(1, 6):
        positive = both(xl, positive, during(xl, xl.prompt(f"tree {n}"), 0.16 * n, 0.16 * n + 0.1))
    watch = Watch()
    xl.sample(watch.attach(stepped(xl.model, speed=2.0)), positive=positive, steps=24)
    assert watch.most == 1


@pytest.mark.parametrize("schedule", ["standard_static", "looped_uniform"])
def test_context_windows(xl: Pair, schedule: str) -> None:
    """Several calls of one form in each evaluation, the last one shorter. A schedule may move them
    from step to step: what is then in no place of before is computed, and is not kept for good.
    """
    windows = xl.patch(
        "ContextWindowsManual",
        context_length=3,
        context_overlap=1,
        context_schedule=schedule,
        context_stride=1,
        closed_loop=False,
        fuse_method="pyramid",
        dim=0,
        freenoise=False,
        cond_retain_index_list="",
        split_conds_to_windows=False,
        latent_retain_index_list="",
        causal_window_fix=False,
    )
    counts = check(xl, sample=_behind(windows, xl.sample), batch=7)
    assert counts["forecast"] > 0 or schedule == "looped_uniform"
    watch = Watch()
    _behind(windows, xl.sample)(watch.attach(stepped(xl.model)), batch=7, steps=STEPS)
    assert watch.most <= 2 * 4


def test_a_control_that_comes_and_goes_in_the_run(xl: Pair) -> None:
    options = {"start_percent": 0.3, "end_percent": 0.7}
    sampling = _controlled(xl, (_net(xl, "narrowxl"), options))
    edges = {step_of(xl, part, STEPS) for part in options.values()}
    full = {0, 1, 2, 11}
    forced = {after for edge in edges for after in (edge, edge + 1)}
    reference = Reference({*full, *forced}, anew=edges)
    counts = check(xl, full=full, reference=reference, **sampling)
    assert counts["full"] == len(full | forced) < STEPS


@pytest.mark.parametrize("how", list(Forecast))
def test_nothing_is_read_from_the_device_within_a_run(xl: Pair, how: Forecast) -> None:
    """But the sigmas, once: a GPU is never waited for."""
    ours = stepped(xl.model, speed=2.0, forecast=how)
    reads = Reads(ours)
    xl.sample(ours, steps=24)
    assert evaluations(ours)["forecast"] == 12
    assert (reads.runs, reads.found) == (1, ["tolist"])
