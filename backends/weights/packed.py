"""Weights in blocks of bytes (GGUF files), on the device or elsewhere: a product unpacks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..host_api import gguf
from ..kernels.packed_blocks import Packed
from .source import Brought, Pairs, WeightSource, lies_elsewhere
from .streamed import Streamed


class InBlocks(WeightSource):
    """The blocks of several layers, copied in one turn of the streams where needed."""

    name = "packed"

    def __init__(self, device: torch.device, dtype: torch.dtype, streamed: Streamed) -> None:
        """Set up; nothing is brought yet.

        Args:
            device: where they come.
            dtype: of the product.
            streamed: copies what is elsewhere.
        """
        self._device, self._dtype = device, dtype
        self._streamed = streamed

    def takes(self, module: Any) -> bool:
        return gguf.blocks_of(module) is not None

    def fetch(self, modules: Sequence[Any]) -> Brought:
        pairs: Pairs = {id(module): self._pair(module) for module in modules}
        away = [id(m) for m in modules if lies_elsewhere(m, self._device)]
        if not away:
            return Brought(pairs, self.name, True)
        brought, release = self._streamed.bring([pairs[key] for key in away])
        pairs.update(zip(away, brought, strict=True))
        return Brought(pairs, self.name, False, release)

    def _pair(self, module: Any) -> tuple[Packed, torch.Tensor | None]:
        blocks = gguf.blocks_of(module)
        assert blocks is not None, "asked for by `takes`"
        values, form, steps = blocks.values, blocks.form, blocks.steps
        return Packed.of(values, form, steps, blocks.shape, self._dtype), blocks.bias
