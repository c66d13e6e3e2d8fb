"""Weights in blocks of bytes, as GGML's formats pack them, and their unpacking in plain maths.

A block has one or two scales in fp16, the numbers in 2 to 8 bits each, and in the larger formats a
scale for each 16 or 32 numbers, too. Files also hold weights that are not packed. Each step is
rounded to one dtype, as in the layers of such files.

Source: https://github.com/ggml-org/ggml, `src/ggml-common.h` (what a block holds) and
`src/ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

#: So many numbers are computed at once by plain maths, which takes some forty bytes for each.
_AT_ONCE = 2**24
#: Of the K formats: numbers in a block, and of them those that share a scale.
_K, _SHARE = 256, 32


class _Block:
    """The bytes of all blocks, read from the front, and the dtype that each step is rounded to."""

    def __init__(self, blocks: torch.Tensor, dtype: torch.dtype) -> None:
        self.count = blocks.shape[0]
        self._blocks, self._dtype, self._at = blocks, dtype, 0

    def bytes(self, count: int) -> torch.Tensor:
        """The next ones, as int32 `[blocks, count]`."""
        start, self._at = self._at, self._at + count
        return self._blocks[:, start : self._at].to(torch.int32)

    def half(self) -> torch.Tensor:
        """The next number in fp16, `[blocks, 1, 1]`."""
        low, high = self.bytes(2).chunk(2, dim=1)
        value = (low | high << 8).to(torch.int16).view(torch.float16).float().reshape(-1, 1, 1)
        return value if self._dtype is torch.float16 else self.rounded(value)

    def fields(self, width: int, bits: int, count: int) -> torch.Tensor:
        """The next bytes as numbers of so many bits, `[blocks, count / width, width]`: the lowest
        bits of `width` bytes, then those above them.
        """
        return fields(self.bytes(count * bits // 8), width, bits)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """A step's result, in float32."""
        if self._dtype is torch.float32:
            return values
        # A compiler takes two conversions in a row for one, but not with arithmetic between.
        bits = values.to(self._dtype).view(torch.int16) & -1
        return bits.view(self._dtype).float()

    def scaled(
        self, scales: torch.Tensor, numbers: torch.Tensor, less: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Numbers times their scales, minus an offset."""
        product = self.rounded(scales * numbers)
        return product if less is None else self.rounded(product - less)


def fields(values: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """Numbers of so many bits out of bytes (int32), `[blocks, n, width]`: the lowest bits of
    `width` bytes, then those above them.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=values.device)
    found = values.reshape(values.shape[0], -1, 1, width) >> shifts.reshape(1, 1, -1, 1)
    return (found & (1 << bits) - 1).reshape(values.shape[0], -1, width)


def _bits_of(values: torch.Tensor) -> torch.Tensor:
    """The bits of four bytes, `[blocks, 1, 32]`, lowest first."""
    shifts = torch.arange(8, dtype=torch.int32, device=values.device)
    return (values.reshape(-1, 4, 1) >> shifts & 1).reshape(-1, 1, 32)


def _signed(values: torch.Tensor) -> torch.Tensor:
    """Bytes as numbers from -128 to 127."""
    return values - ((values & 128) << 1)


def _q8_0(block: _Block) -> torch.Tensor:
    scale = block.half()
    return block.scaled(scale, _signed(block.bytes(32)).reshape(-1, 1, 32))


def _q4_0(block: _Block) -> torch.Tensor:
    scale = block.half()
    return block.scaled(scale, block.fields(16, 4, 32).reshape(-1, 1, 32) - 8)


def _q4_1(block: _Block) -> torch.Tensor:
    scale, least = block.half(), block.half()
    return block.scaled(scale, block.fields(16, 4, 32).reshape(-1, 1, 32), -least)


def _q5_0(block: _Block) -> torch.Tensor:
    scale, high = block.half(), _bits_of(block.bytes(4))
    return block.scaled(scale, (block.fields(16, 4, 32).reshape(-1, 1, 32) | high << 4) - 16)


def _q5_1(block: _Block) -> torch.Tensor:
    scale, least, high = block.half(), block.half(), _bits_of(block.bytes(4))
    return block.scaled(scale, block.fields(16, 4, 32).reshape(-1, 1, 32) | high << 4, -least)


def _q2_k(block: _Block) -> torch.Tensor:
    both = block.bytes(16).reshape(-1, 16, 1)
    numbers = block.fields(32, 2, _K).reshape(-1, 16, 16)
    scale, least = block.half(), block.half()
    scales, off = block.rounded(scale * (both & 15)), block.rounded(least * (both >> 4))
    return block.scaled(scales, numbers, off)


def _q3_k(block: _Block) -> torch.Tensor:
    high = block.fields(32, 1, _K).reshape(-1, 16, 16)
    low = block.fields(32, 2, _K).reshape(-1, 16, 16)
    scales = fields(block.bytes(8), 8, 4).reshape(-1, 16, 1)
    scales = (scales | fields(block.bytes(4), 4, 2).reshape(-1, 16, 1) << 4) - 32
    return block.scaled(block.rounded(block.half() * scales), low + (high << 2) - 4)


def _scales_of_k(block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and offsets of eight times 32 numbers: 6 bits each, from twelve bytes."""
    scale, least = block.half(), block.half()
    first, second, last = (block.bytes(4).reshape(-1, 4, 1) for _ in range(3))
    scales = torch.cat((first & 63, last & 15 | (first >> 6) << 4), dim=1)
    off = torch.cat((second & 63, last >> 4 | (second >> 6) << 4), dim=1)
    return block.rounded(scale * scales), block.rounded(least * off)


def _q4_k(block: _Block) -> torch.Tensor:
    scales, off = _scales_of_k(block)
    return block.scaled(scales, block.fields(_SHARE, 4, _K), off)


def _q5_k(block: _Block) -> torch.Tensor:
    scales, off = _scales_of_k(block)
    high = block.fields(_SHARE, 1, _K)
    return block.scaled(scales, block.fields(_SHARE, 4, _K) | high << 4, off)


def _q6_k(block: _Block) -> torch.Tensor:
    low = block.fields(64, 4, _K).reshape(-1, 16, 16)
    high = block.fields(32, 2, _K).reshape(-1, 16, 16)
    scales = _signed(block.bytes(16)).reshape(-1, 16, 1)
    return block.scaled(block.rounded(block.half() * scales), (low | high << 4) - 32)


class BlockFormat(NamedTuple):
    """How numbers are packed.

    Attributes:
        name: of GGML.
        width: how many numbers a block has.
        size: of a block, in bytes.
        numbers: computes them; or the dtype of those that are not packed.
    """

    name: str
    width: int
    size: int
    numbers: Callable[[_Block], torch.Tensor] | torch.dtype

    @property
    def is_packed(self) -> bool:
        """Whether its numbers must be computed."""
        return not isinstance(self.numbers, torch.dtype)

    @property
    def most(self) -> int:
        """How many blocks can be indexed with 32 bits, by their bytes and numbers."""
        return 2**30 // self.width


FORMATS = {
    each.name: each
    for each in (
        BlockFormat("F32", 1, 4, torch.float32),
        BlockFormat("F16", 1, 2, torch.float16),
        BlockFormat("BF16", 1, 2, torch.bfloat16),
        BlockFormat("Q4_0", 32, 18, _q4_0),
        BlockFormat("Q4_1", 32, 20, _q4_1),
        BlockFormat("Q5_0", 32, 22, _q5_0),
        BlockFormat("Q5_1", 32, 24, _q5_1),
        BlockFormat("Q8_0", 32, 34, _q8_0),
        BlockFormat("Q2_K", _K, 84, _q2_k),
        BlockFormat("Q3_K", _K, 110, _q3_k),
        BlockFormat("Q4_K", _K, 144, _q4_k),
        BlockFormat("Q5_K", _K, 176, _q5_k),
        BlockFormat("Q6_K", _K, 210, _q6_k),
    )
}


def unpack(
    blocks: torch.Tensor, form: BlockFormat, steps: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """Return the numbers of blocks.

    Args:
        blocks: uint8 [blocks, size].
        steps: the dtype that each step is rounded to.
        dtype: of the result.

    Returns:
        [blocks, width].
    """
    if isinstance(form.numbers, torch.dtype):
        return blocks.view(form.numbers).to(dtype)
    return form.numbers(_Block(blocks, steps)).reshape(-1, form.width).to(dtype)


def code_of(form: BlockFormat) -> tuple[Callable[..., Any], ...]:
    """Return the functions by which `unpack` computes numbers of a format."""
    methods = (each for each in vars(_Block).values() if isinstance(each, FunctionType))
    return (*methods, *([] if isinstance(form.numbers, torch.dtype) else [form.numbers]))


class Packed:
    """A weight in blocks. It takes the place of a weight tensor (`linear`), and names its parts as
    tensors of several parts do.

    Attributes:
        blocks: uint8 [blocks, size].
        form: how its numbers are packed.
        steps: the dtype that each step of unpacking is rounded to.
        shape: of the weight.
        dtype: of the product.
    """

    def __init__(
        self,
        blocks: torch.Tensor,
        form: BlockFormat,
        steps: torch.dtype,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        self.blocks, self.form = blocks, form
        self.steps, self.shape, self.dtype = steps, shape, dtype

    @classmethod
    def of(
        cls,
        values: torch.Tensor,
        form: str,
        steps: torch.dtype | None,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> Packed:
        """Return a weight by its bytes in any shape and its format's name; with steps None they are
        rounded to the product's dtype.
        """
        blocks = values.view(torch.uint8).reshape(-1, FORMATS[form].size)
        return cls(blocks, FORMATS[form], dtype if steps is None else steps, shape, dtype)

    @property
    def device(self) -> torch.device:
        """Its device."""
        return self.blocks.device

    def unpacked(self) -> torch.Tensor:
        """Return the weight itself, by plain maths."""
        some = torch.split(self.blocks, _AT_ONCE // self.form.width)
        parts = [unpack(each, self.form, self.steps, self.dtype) for each in some]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(self.shape)

    def stride(self) -> tuple[int, ...]:
        """The strides of `unpacked`."""
        return torch.empty(self.shape, device="meta").stride()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["blocks"], (self.form.name, self.steps, self.shape, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, torch.Tensor], context: Any, _shape: Any, _stride: Any
    ) -> Packed:
        name, steps, shape, dtype = context
        return Packed(parts["blocks"], FORMATS[name], steps, shape, dtype)

    def multiply(
        self, input: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `linear(input, weight, bias)`.

        Args:
            bias: in any dtype.
            weight: the unpacked one; None: it is computed by plain maths.
        """
        known = self.unpacked() if weight is None else weight
        return linear(input, known, None if bias is None else bias.to(input.dtype))

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not linear or kwargs or not isinstance(args[1], cls):
            return NotImplemented
        input, weight, *rest = args
        return weight.multiply(input, rest[0] if rest else None)
