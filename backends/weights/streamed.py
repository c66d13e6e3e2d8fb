"""Weights that are elsewhere, copied for one call (partly loaded model, VRAM full)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..host_api import casting
from .lanes import Lanes
from .small import SmallTensors
from .source import Brought, Pairs, WeightSource, is_final, lies_elsewhere, pair_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Streamed(WeightSource):
    """The weights of several modules, in one turn of the streams; small parts of quantised ones are
    kept for the epoch.

    They are cast and patched in order with the queued work, as the host does it: a patch may read
    that work's result.
    """

    name = "streamed"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, room: Callable[[], int] | None
    ) -> None:
        """Set up; nothing is brought yet.

        Args:
            device: to which they are copied.
            dtype: in which dtype they come.
            room: `Lanes`' room for them.
        """
        self._device, self._dtype = device, dtype
        self.lanes = Lanes(device, room)
        self.small = SmallTensors(device)

    def takes(self, module: Any) -> bool:
        return lies_elsewhere(module, self._device)

    def bring(
        self, pairs: Sequence[tuple[Any, Any]]
    ) -> tuple[list[tuple[Any, Any]], Callable[[], None] | None]:
        """Begin to copy weights with biases, all in one turn of the streams.

        Returns:
            Them, and what to call once the work that uses them is queued, if anything.
        """
        coming = [_Coming(*pair, self.small) for pair in pairs]
        with self.lanes.turn(sum(each.size for each in coming)) as release:
            return [each.brought(self._device) for each in coming], release

    def fetch(self, modules: Sequence[Any]) -> Brought:
        pairs, release = self.bring([pair_of(module) for module in modules])
        found: Pairs = {}
        try:
            for module, pair in zip(modules, pairs, strict=True):
                found[id(module)] = self._finished(module, pair)
        except BaseException:
            if release is not None:
                release()
            raise
        done = None if release is None else partial(_let_go, release, pairs)
        return Brought(found, self.name, False, done)

    def begin_step(self) -> None:
        self.lanes.begin_step()

    def begin_epoch(self) -> None:
        self.small.forget()

    def _finished(self, module: Any, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        if is_final(module, pair, self._dtype):
            return pair
        return casting.finish(module, pair, self._dtype, self._device)


class _Apart(NamedTuple):
    """The tensors of a quantised weight, by name, its numbers first; and the rest of it."""

    parts: dict[str, torch.Tensor]
    context: Any


def parts_of(tensor: Any) -> list[torch.Tensor] | None:
    """The plain tensors that a parameter consists of, None if unknown."""
    apart = parts_and_rest(tensor)
    return None if apart is None else apart[0]


def parts_and_rest(tensor: Any) -> tuple[list[torch.Tensor], Any] | None:
    """The plain tensors that a parameter consists of, and the rest of it, equal for parameters that
    differ only in these tensors. None if unknown.
    """
    if type(tensor) in _PLAIN:
        return [tensor], None
    apart = _taken_apart(tensor)
    if apart is None:
        return None
    return list(apart.parts.values()), (type(tensor), tuple(apart.parts), apart.context)


def made_of(tensor: Any, parts: Iterator[torch.Tensor]) -> Any:
    """A parameter like one whose parts are known, over the next of these parts."""
    if type(tensor) in _PLAIN:
        return next(parts)
    apart = _taken_apart(tensor)
    assert apart is not None
    return _put_together(tensor, {name: next(parts) for name in apart.parts}, apart)


def _put_together(whole: Any, parts: dict[str, torch.Tensor], apart: _Apart) -> Any:
    return type(whole).__tensor_unflatten__(
        {name: parts[name] for name in apart.parts}, apart.context, whole.shape, whole.stride()
    )


def _taken_apart(tensor: Any) -> _Apart | None:
    """What a tensor subclass says that it consists of; None for any other tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    known = parts and all(type(part) in _PLAIN for part in parts.values())
    return _Apart(parts, context) if known else None


class _Coming:
    """A weight and a bias on their way to a device."""

    def __init__(self, weight: Any, bias: Any, small: SmallTensors) -> None:
        """Sort out what is to be copied.

        Args:
            weight, bias: of a module.
            small: keeps the small parts of quantised weights; never their numbers.
        """
        self._weight, self._bias = weight, bias
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
        """Copy them; the copies are complete once the stream's work is."""
        found = {name: casting.bring(part, device) for name, part in self._away.items()}
        if self._apart is None:
            weight = found.get("weight")
        else:
            weight = _put_together(self._weight, found | self._kept, self._apart)
        return weight, None if self._bias is None else casting.bring(self._bias, device)


def _let_go(release: Callable[[], None], pairs: list[tuple[Any, Any]]) -> None:
    release()
    pairs.clear()  # not before, since others may be computed from it
