"""Files as the pack for GGUF files reads them: matrices of blocks in one format, the rest as it is.

Writing one needs the package `gguf` (`pip install gguf`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from .quantised import is_of_a_block


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as bytes, a row of blocks for each of its rows: 32 numbers of 8 bits and
    their scale.
    """
    rows = weight.float().reshape(-1, 32)
    scale = (rows.abs().amax(dim=1, keepdim=True) / 127).to(torch.float16)
    numbers = (rows / scale.float()).nan_to_num().round().clamp(-127, 127).to(torch.int8)
    blocks = torch.cat((scale.view(torch.uint8), numbers.view(torch.uint8)), dim=1)
    return blocks.reshape(weight.shape[0], -1)


def q4_k(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as bytes likewise: 256 numbers of 4 bits, a scale and what is taken off for
    each 32 of them in 6 bits, and a scale for each of these two.
    """
    rows = weight.float().reshape(-1, 8, 32)
    least = (-rows.amin(dim=2)).clamp(min=0)
    step = (rows.amax(dim=2) + least) / 15
    of_steps = (step.amax(dim=1, keepdim=True) / 63).to(torch.float16)
    of_least = (least.amax(dim=1, keepdim=True) / 63).to(torch.float16)
    steps, off = (
        (values / scale.float()).nan_to_num().round().clamp(0, 63).to(torch.int32)
        for values, scale in ((step, of_steps), (least, of_least))
    )
    scales = (of_steps.float() * steps)[:, :, None]
    numbers = (rows + (of_least.float() * off)[:, :, None]) / scales
    numbers = numbers.nan_to_num().round().clamp(0, 15).to(torch.uint8)
    first, later = slice(0, 4), slice(4, 8)
    packed = (
        steps[:, first] | (steps[:, later] >> 4) << 6,
        off[:, first] | (off[:, later] >> 4) << 6,
        steps[:, later] & 15 | (off[:, later] & 15) << 4,
    )
    pairs = numbers.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    heads = (of_steps.view(torch.uint8), of_least.view(torch.uint8))
    blocks = torch.cat((*heads, *(each.to(torch.uint8) for each in packed), nibbles), dim=1)
    return blocks.reshape(weight.shape[0], -1)


#: By the format's name.
FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"Q8_0": q8_0, "Q4_K": q4_k}


def write(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    form: str,
    *,
    architecture: str,
    device: str = "cpu",
) -> None:
    """Write a file.

    Args:
        form: of `FORMATS`.
        architecture: what the file says that it is, as the pack names it.
        device: where weights are packed, one at a time.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    for name, weight in weights.items():
        if is_of_a_block(name, weight):
            packed = FORMATS[form](weight.to(device)).cpu().numpy()
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType[form])
        else:
            writer.add_tensor(name, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
