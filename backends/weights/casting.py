"""Weights as they are on the device, or as the host's function for one module makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..host_api import casting
from ..host_api.layers import is_stored
from ..kinds.layout import ALIGNMENT
from .source import Brought, WeightSource, is_final, lies_elsewhere, pair_of, same_device


class Resident(WeightSource):
    """The parameter itself, on the device in the compute dtype."""

    name = "resident"

    def takes(self, module: Any) -> bool:
        """Whatever no other source does."""
        return True

    def fetch(self, modules: Sequence[Any]) -> Brought:
        return Brought({id(m): pair_of(m) for m in modules}, self.name, True)


class Cast(WeightSource):
    """On the device in another dtype or with functions on top (fp8, weight wrappers): made at each
    call.
    """

    name = "cast"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def takes(self, module: Any) -> bool:
        return not is_final(module, pair_of(module), self._dtype)

    def fetch(self, modules: Sequence[Any]) -> Brought:
        return Brought({id(m): self._made(m) for m in modules}, self.name, False)

    def _made(self, module: Any) -> tuple[Any, Any]:
        weight, bias, token = casting.cast(module, self._dtype, self._device)
        casting.let_go(module, weight, bias, token)
        return weight, bias


class OneByOne(Cast):
    """Elsewhere, by the same function, if the host lacks what `Streamed` needs."""

    name = "streamed"

    def takes(self, module: Any) -> bool:
        return lies_elsewhere(module, self._device)

    def _made(self, module: Any) -> tuple[Any, Any]:
        weight, bias, token = casting.cast(module, self._dtype, self._device)
        # Copied, for under dynamic VRAM it does not show where that is.
        weight, bias = weight.clone(), None if bias is None else bias.clone()
        casting.let_go(module, weight, bias, token)
        return weight, bias


def fetch_loose(parameter: Any, device: torch.device, dtype: torch.dtype) -> tuple[str, Any]:
    """A parameter outside of layers, and the name of such weights: the host's blocks convert it to
    the device and dtype of what they add it to or multiply it with. It is never kept: a LoRA of one
    conditioning is written into it between two calls.

    Args:
        dtype: that the graph takes; another one only if nothing computes in the parameter's.
    """
    if not isinstance(parameter, torch.Tensor):
        return Resident.name, parameter
    to = dtype if is_stored(parameter.dtype) else parameter.dtype
    here = same_device(parameter.device, device)
    if here and to == parameter.dtype:
        if parameter.data_ptr() % ALIGNMENT == 0:
            return Resident.name, parameter
        return Cast.name, parameter.detach().clone()  # a small one, as in its file
    if here:
        return Cast.name, parameter.to(to)
    return OneByOne.name, parameter.to(device).to(to)
