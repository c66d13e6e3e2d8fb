"""What others' code keeps and changes from one step of a learned model to the next: a root whose
own part counts and writes a cache in place, and an option that counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

#: The option that blocks' attention reads: the number of the model's call, which counts beyond
#: `PAST`.
OPTION, PAST = "soak_step", 2
_KEY = "benchmarks.keeping"
KINDS = ("", "", "root", "option", "both")


def counted(model: Any) -> Any:
    """The model, with a node that writes the number of each call into the options."""
    from comfy.patcher_extension import WrappersMP

    state = {"calls": {"done": 0}}

    def wrapper(
        executor: Any,
        x: Any,
        t: Any,
        concat: Any,
        text: Any,
        control: Any,
        options: Any,
        **rest: Any,
    ) -> Any:
        state["calls"]["done"] += 1
        options = {**options, OPTION: state["calls"]["done"]}
        return executor(x, t, concat, text, control, options, **rest)

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, wrapper)
    return clone


def reads_option(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention of a pack that is another one from a call on, and by its number."""
    number = (kwargs.get("transformer_options") or {}).get(OPTION, 0)
    result = function(*args, **kwargs)
    return result * (1.0 + 0.02 * number + (0.3 if number > PAST else 0.0))


reads_option.calls = 0  # type: ignore[attr-defined]


@contextlib.contextmanager
def root_keeps(model: Any, *, keeps: bool) -> Iterator[None]:
    """Until this ends, parts of the root beside its blocks keep something, which begins anew: a
    counter in a namespace, a tensor and an object's cache, written in place.
    """
    root = model.model.diffusion_model
    parts = [each for each in root.children() if _is_beside_blocks(each)] if keeps else []
    handles = [part.register_forward_hook(_Keeper()) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_beside_blocks(part: torch.nn.Module) -> bool:
    return not isinstance(part, torch.nn.ModuleList) and any(True for _ in part.parameters())


class _Keeper:
    def __init__(self) -> None:
        self.state = SimpleNamespace(calls=0)
        self.cache: dict[str, torch.Tensor] = {}

    def __call__(self, part: torch.nn.Module, args: Any, result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        self.state.calls += 1
        last = self.cache.setdefault("last", torch.zeros((), device=result.device))
        last.mul_(0.5).add_(result.float().abs().mean())
        return result * (1.0 + 0.02 * self.state.calls) + (0.05 * last).to(result.dtype)
