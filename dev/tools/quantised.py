"""Quantise a network's weights as the files that people load have them: by the functions of the
host's own library, under the names that the host's loader reads.

`python -m dev.tools.quantised --host TREE FORMAT SOURCE.safetensors RESULT.safetensors` writes one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Format(NamedTuple):
    """A format: what the host's layout is asked for, and what a file says of a layer; of its input,
    too, where it was calibrated.
    """

    layout: str
    marks: Mapping[str, Any]
    options: Mapping[str, Any] = {}
    input_scale: float | None = None


FORMATS = {
    "int8": Format("TensorWiseINT8Layout", {"format": "int8_tensorwise"}),
    "int8_convrot": Format(
        "TensorWiseINT8Layout",
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
        {"per_channel": True, "convrot": True, "convrot_groupsize": 256},
    ),
    "convrot_w4a4": Format(
        "TensorCoreConvRotW4A4Layout", {"format": "convrot_w4a4", "convrot_groupsize": 256}
    ),
    "fp8_e4m3fn": Format("TensorCoreFP8E4M3Layout", {"format": "float8_e4m3fn"}),
    "fp8_e4m3fn_inputs": Format(
        "TensorCoreFP8E4M3Layout", {"format": "float8_e4m3fn"}, input_scale=0.02
    ),
    "fp8_e5m2": Format("TensorCoreFP8E5M2Layout", {"format": "float8_e5m2"}),
    "mxfp8": Format("TensorCoreMXFP8Layout", {"format": "mxfp8"}),
    "nvfp4": Format("TensorCoreNVFP4Layout", {"format": "nvfp4"}),
}


def is_of_a_block(name: str, weight: torch.Tensor) -> bool:
    """Tell whether a weight is a matrix of one of a transformer's repeated blocks: embeddings and
    the last layer keep their precision in such files, as do the small networks of a few families.
    """
    repeated = "blocks." in name or name.startswith("layers.")
    if any(part in name for part in ("connector", "gate_logits", "adaln_proj")):
        return False
    return repeated and weight.dim() == 2 and name.endswith("weight")


def quantised(
    weights: Mapping[str, torch.Tensor],
    form: str | Callable[[str], str],
    *,
    device: str = "cpu",
    takes: Callable[[str, torch.Tensor], bool] = is_of_a_block,
) -> dict[str, torch.Tensor]:
    """Return what a file of these weights holds in a format.

    Args:
        form: of `FORMATS`, or what says which a weight has: files mix them.
        device: where weights are quantised, one at a time.
        takes: whether a weight of this name is quantised.
    """
    from comfy.quant_ops import QuantizedTensor

    file: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not takes(name, weight):
            file[name] = weight
            continue
        chosen = FORMATS[form if isinstance(form, str) else form(name)]
        packed = QuantizedTensor.from_float(
            weight.to(device), chosen.layout, scale="recalculate", **chosen.options
        )
        file |= {key: _stored(value.cpu()) for key, value in packed.state_dict(name).items()}
        layer = name.removesuffix("weight")
        marks = json.dumps(chosen.marks).encode()
        file[f"{layer}comfy_quant"] = torch.tensor(list(marks), dtype=torch.uint8)
        if chosen.input_scale is not None:
            file[f"{layer}input_scale"] = torch.tensor(chosen.input_scale)
    return file


def _stored(part: torch.Tensor) -> torch.Tensor:
    """Exponents as the bytes that files have them as: the host's reader knows no other type."""
    return part.view(torch.uint8) if part.dtype is torch.float8_e8m0fnu else part


def main() -> None:
    """Write a quantised copy of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", type=Path, required=True, help="the ComfyUI tree")
    parser.add_argument("form", choices=list(FORMATS))
    parser.add_argument("source", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    sys.path[0] = str(options.host)
    import comfy.options

    comfy.options.enable_args_parsing(False)
    from comfy.cli_args import args
    from safetensors.torch import load_file, save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.cpu = device == "cpu"  # before comfy.model_management is imported
    file = quantised(load_file(options.source), options.form, device=device)
    save_file({key: value.contiguous() for key, value in file.items()}, options.result)
    print(f"{options.result} ({options.result.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
