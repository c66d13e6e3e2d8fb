"""What the host's own functions give for a module's weights, where and as it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..host_api import casting, dynamic_vram
from ..host_api.layers import has_functions, is_stored
from .lanes import Lanes
from .small import SmallTensors

#: In bytes, of what a graph takes.
ALIGNMENT = 16
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class NoRoomError(ValueError):
    """There is no room for weights that were asked for together."""


class _Apart(NamedTuple):
    """What a quantised weight consists of, by name, its numbers first; and the rest of it."""

    parts: dict[str, torch.Tensor]
    context: Any


def is_dynamic(module: Any, device: torch.device) -> bool:
    """Tell whether a module's weights come to the device by the host's dynamic VRAM."""
    if not dynamic_vram.has_place(module):
        return False
    weight = getattr(module, "weight", None)
    return weight is not None and not same_device(weight.device, device)


def same_device(a: torch.device, b: torch.device) -> bool:
    """Tell whether two devices are one, index 0 being meant where none is given."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def parts_of(tensor: Any) -> list[torch.Tensor] | None:
    """The plain tensors that a parameter consists of, None where that is not known."""
    if type(tensor) in _PLAIN:
        return [tensor]
    apart = _taken_apart(tensor)
    return list(apart.parts.values()) if apart is not None else None


def _taken_apart(tensor: Any) -> _Apart | None:
    """What a tensor of a class of its own says that it consists of; None of any other."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    known = parts and all(type(part) in _PLAIN for part in parts.values())
    return _Apart(parts, context) if known else None


def lies_elsewhere(module: Any, device: torch.device) -> bool:
    """Tell whether a weight of a module has to be brought to a device."""
    return any(w is not None and not same_device(w.device, device) for w in _pair(module))


def fetch_plain(
    module: Any, device: torch.device, dtype: torch.dtype
) -> tuple[str, tuple[Any, Any]]:
    """A module's weights by the host's function for one module.

    What it brings over is copied, for under dynamic VRAM it does not show where that is.

    Returns:
        Their class, (weight, bias).
    """
    away = lies_elsewhere(module, device)
    if not away and _is_final(module, _pair(module), dtype):
        return "resident", _pair(module)
    weight, bias, token = casting.cast(module, dtype, device)
    if away:
        weight, bias = weight.clone(), None if bias is None else bias.clone()
    casting.let_go(module, weight, bias, token)
    return "streamed" if away else "cast", (weight, bias)


def fetch_away(
    modules: Sequence[Any],
    device: torch.device,
    dtype: torch.dtype,
    lanes: Lanes,
    small: SmallTensors,
) -> tuple[dict[int, tuple[Any, Any]], Callable[[], None] | None]:
    """The weights of several modules that lie elsewhere, in one turn of the streams for them; small
    parts of quantised ones are kept.

    They are cast and patched in order with the work that is queued, as the host does it: what a
    patch reads may be the result of that.

    Returns:
        {id(module): (weight, bias)}, and what to call once the work that uses them is queued.
    """
    coming = [_Coming(module, small) for module in modules]
    with lanes.turn(sum(each.size for each in coming)) as release:
        pairs = [each.brought(device) for each in coming]
    found = {}
    try:
        for module, pair in zip(modules, pairs, strict=True):
            final = _is_final(module, pair, dtype)
            found[id(module)] = pair if final else casting.finish(module, pair, dtype, device)
    except BaseException:
        if release is not None:
            release()
        raise
    return found, None if release is None else partial(_let_go, release, pairs)


def fetch_loose(parameter: Any, device: torch.device, dtype: torch.dtype) -> tuple[str, Any]:
    """A parameter that is no layer's, and its class: the host's blocks bring such a one over by
    themselves, as what it is added to or multiplied with. It is never kept: a LoRA of one
    conditioning is written into it between two calls.

    Args:
        dtype: what the graph takes; another one only where nothing computes in the parameter's.
    """
    if not isinstance(parameter, torch.Tensor):
        return "resident", parameter
    to = dtype if is_stored(parameter.dtype) else parameter.dtype
    here = same_device(parameter.device, device)
    if here and to == parameter.dtype:
        if parameter.data_ptr() % ALIGNMENT == 0:
            return "resident", parameter
        return "cast", parameter.detach().clone()  # a small one, as it lies in its file
    if here:
        return "cast", parameter.to(to)
    return "streamed", parameter.to(device).to(to)


def fetch_dynamic(
    modules: list[Any], device: torch.device, dtype: torch.dtype
) -> tuple[dict[int, tuple[Any, Any]], bool, Callable[[], None]]:
    """The weights of several modules in dynamic VRAM, in one call of the host's functions.

    Returns:
        {id(module): (weight, bias)}, whether all of them stay where they are after the call, and
        what to call once the work that uses them is queued.

    Raises:
        NoRoomError: there is not even room to bring all of them over at once.
    """
    fresh = [m for m in modules if not dynamic_vram.is_begun(m)]
    found: dict[int, tuple[Any, Any]] = {}
    stream = None
    failure: Exception | None = None
    held = [m for m in modules if dynamic_vram.holds_pages(m)]
    try:
        stream = dynamic_vram.begin_copies(fresh, held, dtype, device)
        dynamic_vram.await_copies(device, stream)
        for module in modules:
            found[id(module)] = dynamic_vram.end_copy(module, dtype, device)
    except Exception as error:  # of whatever sort: what is held has to be let go
        failure = error
        for module in modules:
            # The host notes a page as good before a LoRA is applied to what lies there.
            if not dynamic_vram.is_there(module):
                dynamic_vram.mark_empty(module)
    for module in fresh:
        dynamic_vram.forget_copy(module)
    release = dynamic_vram.releaser(held, device, stream)
    if failure is not None:
        release()
        if not isinstance(failure, (RuntimeError, MemoryError)):
            raise failure
        raise NoRoomError(f"they could not be brought over together: {failure}") from failure
    stays = len(held) == len(modules) and all(
        dynamic_vram.lie_in_place(m, found[id(m)]) for m in modules
    )
    return found, stays, release


def _pair(module: Any) -> tuple[Any, Any]:
    return module.weight, module.bias


class _Coming:
    """A module's weights on their way to a device."""

    def __init__(self, module: Any, small: SmallTensors) -> None:
        """Args: what keeps the small parts of quantised ones; their numbers are none."""
        self._weight, self._bias = _pair(module)
        self._apart = _taken_apart(self._weight)
        self._kept: dict[str, torch.Tensor] = {}
        #: What is to be brought, by name.
        self._away: dict[str, torch.Tensor] = {}
        if self._apart is not None:
            for i, (name, part) in enumerate(self._apart.parts.items()):
                there = small.bring(part) if i else None
                if there is None:
                    self._away[name] = part
                else:
                    self._kept[name] = there
        elif self._weight is not None:
            self._away["weight"] = self._weight
        coming = [*self._away.values(), *([] if self._bias is None else [self._bias])]
        #: In bytes, of what is not there.
        self.size = sum(each.nbytes for each in coming)

    def brought(self, device: torch.device) -> tuple[Any, Any]:
        """Bring them over; the copies are complete once the stream's work is."""
        found = {name: casting.bring(part, device) for name, part in self._away.items()}
        if self._apart is None:
            weight = found.get("weight")
        else:
            whole, given = self._weight, found | self._kept
            weight = type(whole).__tensor_unflatten__(
                {name: given[name] for name in self._apart.parts},
                self._apart.context,
                whole.shape,
                whole.stride(),
            )
        return weight, None if self._bias is None else casting.bring(self._bias, device)


def _let_go(release: Callable[[], None], pairs: list[tuple[Any, Any]]) -> None:
    release()
    pairs.clear()  # of which others may have been computed: not before


def _is_final(module: Any, pair: tuple[Any, Any], dtype: torch.dtype) -> bool:
    """Whether the module computes with these weights of it as they are."""
    return not has_functions(module) and all(w is None or w.dtype == dtype for w in pair)
