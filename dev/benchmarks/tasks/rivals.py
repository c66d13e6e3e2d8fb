"""Ours and three ways to use `torch.compile`, by turns in one process at one size."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..host import Size
from ..kernels import kernel_times
from ..measure import Probe, Stopwatch
from ..pack import open_engine
from .common import partial, sample
from .forms import Forms
from .rival import skip_transformer_options, torch_compiled, without_dynamic
from .speed import ratio, time_pair

logger = logging.getLogger(__name__)

_KEY = "warmgraph.benchmark.blocks"
_PROFILED_STEPS = 4
_BLOCKS = ("BasicTransformerBlock", "ResBlock")
#: Instances of one class that may be compiled; beyond it Dynamo runs them eager without a word.
_COMPILED_BLOCKS = 1024


def rivals(
    *,
    model: str,
    kind: str,
    store: str,
    size: list[int],
    rounds: int = 4,
    steps: int = 10,
    workers: int = 0,
) -> dict[str, Any]:
    """Prepare ours, then compile one rival after the other; after each, time all there are.

    So what is known when the parent stops this process compares models that took turns. A rival
    that cannot be compiled is written down with its reason.

    Returns:
        {"row": {name: times}, "compile_seconds": {rival: seconds of its first two calls},
        "ratios": {rival: its UNet call's time / our any-shape one's}, "kernel_ms": {name: the
        GPU's own work in a step, which no processor slows}, "failed": {rival: reason}, "compiling"}
    """
    target = Size(*size)
    engine = open_engine(Path(store), workers=workers)
    made = Forms(engine, Path(model), kind, target)
    made.capture(target)
    result: dict[str, Any] = {"compile_seconds": {}, "ratios": {}, "kernel_ms": {}, "failed": {}}
    models = dict(made.models)
    times = {"rounds": rounds, "steps": steps, "image_steps": 0}
    result["row"] = time_pair(models, kind, target, **times)
    for name, (ours, _) in models.items():
        result["kernel_ms"][name] = _kernel_ms(ours, kind, target)
    result["speedups"] = {form: ratio(result["row"], "eager", form) for form in made.ours}
    for name, compiled in RIVALS.items():
        partial({**result, "compiling": name})
        probe = Probe()
        try:
            clone = compiled(probe.attach(made.pair.eager))
            watch = Stopwatch()
            for _ in range(2):  # a second call may compile once more, or record a graph
                sample(clone, kind, target, steps=1)
            result["compile_seconds"][name] = round(watch.seconds(), 2)
            partial({**result, "compiling": name})
            row = time_pair({**models, name: (clone, probe)}, kind, target, **times)
            kernel_ms = _kernel_ms(clone, kind, target)
        except Exception as error:  # the next one may still do
            logger.exception("%s failed", name)
            result["failed"][name] = f"{type(error).__name__}: {error}"[:1000]
            continue
        models[name] = (clone, probe)
        result["kernel_ms"][name] = kernel_ms
        result["row"] = row
        rows = [n for n in models if n not in made.models]
        result["ratios"] = {n: ratio(row, n, "any_shape") for n in rows}
        result["speedups"] = {n: ratio(row, "eager", n) for n in models if n != "eager"}
        result["counters"] = _counters()
        partial(result)
    result["captured"] = made.captured()
    engine.close()
    return result


def _kernel_ms(model: Any, kind: str, size: Size) -> float:
    run = functools.partial(sample, model, kind, size, steps=_PROFILED_STEPS)
    return round(kernel_times(run)["kernel_ms"] / _PROFILED_STEPS, 2)


def _static(model: Any) -> Any:
    return torch_compiled(model, dynamic=False)


def _reduce_overhead(model: Any) -> Any:
    """What `mode="reduce-overhead"` stands for; a mode cannot be given beside other options."""
    import torch

    options = torch._inductor.list_mode_options("reduce-overhead")
    return torch_compiled(model, dynamic=False, options=options)


def _per_block(model: Any) -> Any:
    """A clone whose transformer and residual blocks are compiled each by itself.

    KJNodes' nodes compile the blocks of a list by the host's helper, which puts compiled modules in
    place while the model is called. A UNet's blocks are told apart by their class, so here it is
    their `forward` that is replaced, for as long.
    """
    import torch
    from comfy.patcher_extension import WrappersMP

    torch._dynamo.config.recompile_limit = _COMPILED_BLOCKS
    torch._dynamo.config.accumulated_recompile_limit = _COMPILED_BLOCKS
    clone = without_dynamic(model)
    options: dict[str, Any] = {"guard_filter_fn": skip_transformer_options}
    forwards = [
        (module, torch.compile(module.forward, dynamic=False, options=options))
        for module in clone.model.diffusion_model.modules()
        if type(module).__name__ in _BLOCKS
    ]

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        for module, forward in forwards:
            module.__dict__["forward"] = forward
        try:
            return executor(*args, **kwargs)
        finally:
            for module, _ in forwards:
                module.__dict__.pop("forward", None)

    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, call)
    return clone


RIVALS: dict[str, Callable[[Any], Any]] = {
    "torch_compile": _static,
    "reduce_overhead": _reduce_overhead,
    "per_block": _per_block,
}


def _counters() -> dict[str, int]:
    """What tells whether a rival ran as it should: graphs, and CUDA graphs that it went without."""
    from torch._dynamo.utils import counters

    return {
        "unique_graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
    }
