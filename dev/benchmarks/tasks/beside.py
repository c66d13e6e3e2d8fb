"""Captured and compiled calls beside other nodes' code: right while it lasts, quick again after."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..host import Size, load_unet
from ..measure import rel_l2
from ..pack import open_engine
from .common import CAPTURE_STEPS, partial, sample

STEPS = 6


def beside(*, model: str, kind: str, store: str, size: list[int]) -> dict[str, Any]:
    """Final latents through Compile Model against eager's, under the same harm, run by run.

    Returns:
        {"rows": [{"name", "error" (relative L2), "effect" of the harm on eager, "replayed",
        "captures", "reasons"}]}; between two harms comes a run without one.
    """
    engine = open_engine(Path(store))
    eager = load_unet(Path(model))
    ours = engine.compile_model(eager, when_missing="wait")
    target = Size(*size)
    rows: list[dict[str, Any]] = []
    plain = sample(eager, kind, target, steps=STEPS)
    plain = sample(eager, kind, target, steps=STEPS)  # see `captured.exact`
    sample(ours, kind, target, steps=CAPTURE_STEPS)

    def run(name: str, harm: Callable[[Any, Any], contextlib.AbstractContextManager[None]]) -> None:
        harmed = _around(harm, engine, ours)
        expected = sample(harmed(eager), kind, target, steps=STEPS)
        before = engine.report(ours)["captured"]
        found = sample(harmed(ours), kind, target, steps=STEPS)
        after = engine.report(ours)["captured"]
        rows.append(
            {
                "name": name,
                "error": rel_l2(found, expected),
                "effect": rel_l2(expected, plain),
                "replayed": after["replayed"] - before["replayed"],
                "captures": after["captures"] - before["captures"],
                "reasons": list(after["not_replayed"]),
                "eager": [entry["reason"] for entry in engine.report(ours)["eager"]],
            }
        )
        partial({"rows": rows})

    run("plain", _nothing)
    for name, harm in _HARMS.items():
        run(name, harm)
        run(f"after {name}", _nothing)
    engine.close()
    return {"rows": rows}


def _around(
    harm: Callable[[Any, Any], contextlib.AbstractContextManager[None]], engine: Any, ours: Any
) -> Callable[[Any], Any]:
    """The patch that does the harm around each call of the diffusion model, outside of ours."""
    from comfy.patcher_extension import WrappersMP

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with harm(engine, ours):
            return executor(*args, **kwargs)

    def patch(model: Any) -> Any:
        clone = model.clone()
        kind = WrappersMP.DIFFUSION_MODEL
        clone.wrappers[kind] = {"tests.harm": [wrapper], **clone.wrappers.get(kind, {})}
        return clone

    return patch


@contextlib.contextmanager
def _nothing(_engine: Any, _ours: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _other_norms(_engine: Any, _ours: Any) -> Iterator[None]:
    """As a pack for videos: norms over all images of a batch, on torch's class and the host's."""
    import comfy.ops
    import torch

    def norm(layer: Any, input: Any, weight: Any, bias: Any) -> Any:
        joined = input.movedim(0, 1).flatten(1, 2).unsqueeze(0)
        even = torch.nn.functional.group_norm(joined, layer.num_groups, None, None, layer.eps)
        images = even.squeeze(0).unflatten(1, (input.shape[0], -1)).movedim(1, 0)
        return images * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)

    def joint(self: Any, input: Any) -> Any:
        return norm(self, input, self.weight, self.bias)

    def joint_cast(self: Any, input: Any) -> Any:
        weight, bias, token = comfy.ops.cast_bias_weight(self, input, offloadable=True)
        result = norm(self, input, weight, bias)
        comfy.ops.uncast_bias_weight(self, weight, bias, token)
        return result

    theirs = comfy.ops.disable_weight_init.GroupNorm
    before = torch.nn.GroupNorm.forward, theirs.forward_comfy_cast_weights
    torch.nn.GroupNorm.forward, theirs.forward_comfy_cast_weights = joint, joint_cast
    try:
        yield
    finally:
        torch.nn.GroupNorm.forward, theirs.forward_comfy_cast_weights = before


@contextlib.contextmanager
def _a_dropped_graph(engine: Any, ours: Any) -> Iterator[None]:
    """A graph turns out to be wrong with another model, while it lies in captured calls here."""
    graph = engine._objects.carried(ours).scope.graphs[0]
    if graph.loaded is not None:
        graph.drop("it was wrong elsewhere")
    yield


@contextlib.contextmanager
def _broken_weights(engine: Any, _ours: Any) -> Iterator[None]:
    """A host whose function takes other keywords than ours gives."""
    import comfy.ops

    before = comfy.ops.cast_modules_with_vbar

    def other(modules: Any, *args: Any) -> Any:
        if len(modules) > 1:  # the host's own calls bring one at a time
            raise TypeError("cast_modules_with_vbar() takes another number of arguments")
        return before(modules, *args)

    comfy.ops.cast_modules_with_vbar = other
    try:
        yield
    finally:
        comfy.ops.cast_modules_with_vbar = before


_HARMS = {
    "norms replaced on their classes": _other_norms,
    "a dropped graph": _a_dropped_graph,
    "a host's function with other arguments": _broken_weights,
}
