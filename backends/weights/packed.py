"""Weights in blocks of bytes (GGUF files), on the device or elsewhere: a product unpacks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..host_api import casting, gguf
from ..kernels.packed_blocks import FORMATS, Packed
from .source import Brought, Pairs, WeightSource, lies_elsewhere
from .streamed import Streamed


class InBlocks(WeightSource):
    """The blocks of several layers, all that lie elsewhere in one turn of the streams."""

    name = "packed"

    def __init__(self, device: torch.device, dtype: torch.dtype, streamed: Streamed) -> None:
        """Set up; nothing is brought yet.

        Args:
            device: where they come.
            dtype: in which they are multiplied by.
            streamed: the source of what lies elsewhere, whose streams are used.
        """
        self._device, self._dtype = device, dtype
        self._lanes = streamed.lanes

    def takes(self, module: Any) -> bool:
        return gguf.blocks_of(module) is not None

    def fetch(self, modules: Sequence[Any]) -> Brought:
        here = [module for module in modules if not lies_elsewhere(module, self._device)]
        pairs: Pairs = {id(module): self._pair(module) for module in here}
        away = {id(m): self._pair(m) for m in modules if id(m) not in pairs}
        if not away:
            return Brought(pairs, self.name, True)
        size = sum(each.nbytes for packed, bias in away.values() for each in _tensors(packed, bias))
        with self._lanes.turn(size) as release:
            brought = {key: self._brought(*pair) for key, pair in away.items()}
        return Brought({**pairs, **brought}, self.name, False, release)

    def _pair(self, module: Any) -> tuple[Packed, torch.Tensor | None]:
        blocks = gguf.blocks_of(module)
        assert blocks is not None, "asked for by `takes`"
        form = FORMATS[blocks.form]
        values = blocks.values.view(torch.uint8).reshape(-1, form.size)
        steps = self._dtype if blocks.steps is None else blocks.steps
        packed = Packed(values, form, steps, blocks.shape, self._dtype)
        return packed, gguf.plain_bias(module)

    def _brought(
        self, packed: Packed, bias: torch.Tensor | None
    ) -> tuple[Packed, torch.Tensor | None]:
        blocks = casting.bring(packed.blocks, self._device)
        there = Packed(blocks, packed.form, packed.steps, packed.shape, packed.dtype)
        return there, None if bias is None else casting.bring(bias, self._device)


def _tensors(packed: Packed, bias: torch.Tensor | None) -> list[torch.Tensor]:
    return [packed.blocks] if bias is None else [packed.blocks, bias]
