"""What chooses the kernels of a graph's operators at run time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..host_api import activations, gguf
from ..kernels.packed_blocks import Packed
from ..reasons import Reason
from .attention_choice import AttentionChoice
from .auxiliary import AuxiliaryGraphs
from .exact_attention import Kernel
from .int8_products import Int8Products
from .packed_products import unpacked


class Products:
    """Multiplies by the weights of layers that graphs leave to the host: a `call_context.Caller`,
    by what a weight is; for any thread.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        """Set up; nothing is chosen yet.

        Args:
            directory: where times are kept, the pack's private folder.
            machine: a name for this machine's card and PyTorch.
        """
        #: Our own graphs that may be called.
        self.graphs = AuxiliaryGraphs()
        self.int8 = Int8Products(directory, machine, self.graphs)

    def call(self, layer: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
        """Return what `layer(input)` would."""
        patched = gguf.patched_blocks_of(layer)
        found = None if patched is None else self._by_blocks(layer, patched, input)
        return self.int8.call(layer, input) if found is None else found

    def multiply(
        self, input: torch.Tensor, weight: Any, bias: torch.Tensor | None, act: str = ""
    ) -> torch.Tensor:
        """Return `linear(input, weight, bias)`, with the input after `act` if one is named."""
        if isinstance(weight, Packed):
            active = activations.activated(input, act)
            return weight.multiply(active, bias, unpacked(weight, self.graphs))
        return self.int8.multiply(input, weight, bias, act)

    def _by_blocks(
        self, layer: torch.nn.Module, blocks: gguf.Blocks, input: torch.Tensor
    ) -> torch.Tensor | None:
        """The product by a weight that is unpacked here, and changed as the layer would; None if no
        graph unpacks it.
        """
        device, dtype = input.device, input.dtype
        values = blocks.values.to(device, non_blocking=True)
        weight = Packed.of(values, blocks.form, blocks.steps, blocks.shape, dtype)
        bias = None if blocks.bias is None else blocks.bias.to(device, non_blocking=True)
        whole, change = unpacked(weight, self.graphs), gguf.change_of(layer)
        if whole is None:
            return None
        return weight.multiply(input, bias, whole if change is None else change(whole))

    def multiply_several(
        self, input: torch.Tensor, layers: Sequence[tuple[Any, Any]], act: str = ""
    ) -> list[torch.Tensor]:
        """Return what `multiply` would by each (weight, bias)."""
        if any(isinstance(weight, Packed) for weight, _ in layers):
            return [self.multiply(input, *layer, act) for layer in layers]
        return self.int8.multiply_several(input, layers, act)


class Choices(NamedTuple):
    """Of attention, and of products by quantised weights; None leaves one to the host."""

    attention: AttentionChoice | None
    products: Products | None

    @classmethod
    def kept(cls, directory: Path, machine: str) -> Choices:
        """Make the choices that measure.

        Args:
            directory: where they keep their times, the pack's private folder.
            machine: a name for this machine's card and PyTorch.
        """
        return cls(AttentionChoice(directory, machine), Products(directory, machine))

    def notes(self) -> list[Reason]:
        """Return why kernels that are installed are not used."""
        return [] if self.attention is None else self.attention.notes()

    def could_install(self) -> list[Kernel]:
        """Return attention kernels that this process would have tried, and that are not there."""
        return [] if self.attention is None else self.attention.could_install()


HOSTS = Choices(None, None)
