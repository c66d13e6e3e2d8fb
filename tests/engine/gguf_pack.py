"""A pack whose layers are like those of the pack for GGUF files, and weights as in files."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from warmgraph_tools import gguf_files
from warmgraph_tools import small_transformers as transformers

NAME = "bytes-pack"
#: Where a version may do more in a call, and what that says.
CALL = "    def cast_bias_weight(self, input):\n"
MORE = "        self.seen = input.shape\n"
TEXT = """
import torch
import comfy.lora
import comfy.ops

NODE_CLASS_MAPPINGS = {}
PLAIN = (None, 0, 1)  # in GGML's numbers: nothing, F32, F16


class GGMLTensor(torch.Tensor):
    # Bytes, and what they stand for.
    tensor_type, tensor_shape, patches = None, None, ()

    def detach(self):
        return self

    @property
    def shape(self):
        return self.size() if self.tensor_shape is None else self.tensor_shape


def made(values, number, shape):
    tensor = values.as_subclass(GGMLTensor)
    tensor.tensor_type, tensor.tensor_shape = number, torch.Size(shape)
    return torch.nn.Parameter(tensor, requires_grad=False)


def dequantize_tensor(tensor, dtype, dequant_dtype):
    values = tensor.as_subclass(torch.Tensor)
    if tensor.tensor_type in PLAIN:
        return values.to(dtype)
    steps = dtype if dequant_dtype == "target" else dequant_dtype or torch.float16
    rows = values.reshape(-1, {2: 18, 8: 34}[tensor.tensor_type])
    scale = rows[:, :2].contiguous().view(torch.float16).to(steps)
    numbers = rows[:, 2:]
    if tensor.tensor_type == 2:
        numbers = torch.cat((numbers & 15, numbers >> 4), dim=1).to(torch.int8) - 8
    return (scale * numbers.view(torch.int8)).to(dtype).reshape(tensor.tensor_shape)


class GGMLLayer(torch.nn.Module):
    comfy_cast_weights = True
    dequant_dtype = None
    patch_dtype = None

    def is_ggml_quantized(self):
        return getattr(self.weight, "tensor_type", None) not in PLAIN

    def get_weight(self, tensor, dtype):
        weight = dequantize_tensor(tensor, dtype, self.dequant_dtype)
        for patches, key in getattr(tensor, "patches", ()):
            more = () if self.patch_dtype is None else (self.patch_dtype,)
            weight = comfy.lora.calculate_weight(patches, weight, key, *more)
        return weight

    def cast_bias_weight(self, input):
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return self.get_weight(self.weight, input.dtype), bias

    def forward_comfy_cast_weights(self, input):
        if self.is_ggml_quantized():
            return self.forward_ggml_cast_weights(input)
        result = super().forward_comfy_cast_weights(input)
        return torch.Tensor(result) if isinstance(result, GGMLTensor) else result


class Ops(comfy.ops.manual_cast):
    class Linear(GGMLLayer, comfy.ops.manual_cast.Linear):
        def forward_ggml_cast_weights(self, input):
            weight, bias = self.cast_bias_weight(input)
            return torch.nn.functional.linear(input, weight, bias)

    class LayerNorm(GGMLLayer, comfy.ops.manual_cast.LayerNorm):
        def forward_ggml_cast_weights(self, input):
            weights = self.cast_bias_weight(input)
            return torch.nn.functional.layer_norm(input, self.normalized_shape, *weights, self.eps)

    class Conv2d(GGMLLayer, comfy.ops.manual_cast.Conv2d):
        def forward_ggml_cast_weights(self, input):
            return self._conv_forward(input, *self.cast_bias_weight(input))

    class GroupNorm(GGMLLayer, comfy.ops.manual_cast.GroupNorm):
        def forward_ggml_cast_weights(self, input):
            weights = self.cast_bias_weight(input)
            return torch.nn.functional.group_norm(input, self.num_groups, *weights, self.eps)
"""
#: By the names of formats that the pack unpacks.
NUMBERS = {"Q4_0": 2, "Q8_0": 8}


def installed(install_pack: Any, text: str = TEXT) -> Any:
    """Return the pack's module."""
    folder = str(install_pack(NAME, {"__init__.py": text}))
    return sys.modules[folder.replace(".", "_x_")]


def packed(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return a weight as bytes, each row in blocks of 32 numbers."""
    if name == "Q8_0":
        return gguf_files.q8_0(weight)
    rows = weight.detach().float().reshape(-1, 32)
    scale = (rows.abs().amax(dim=1, keepdim=True) / 7).to(torch.float16)
    numbers = ((rows / scale.float()).round() + 8).clamp(0, 15).to(torch.uint8)
    nibbles = numbers[:, :16] | numbers[:, 16:] << 4
    return torch.cat((scale.view(torch.uint8), nibbles), dim=1).reshape(weight.shape[0], -1)


def load(pack: Any, *, seed: int = 0) -> Any:
    """Return a small Wan out of a file: products of feed-forwards in Q4_0, other products of blocks
    in Q8_0, the head in F32.
    """
    import comfy.sd

    model = comfy.sd.load_diffusion_model_state_dict(
        transformers.weights("wan", seed=seed),
        model_options={"custom_operations": pack.Ops},
        metadata={"config": json.dumps({"transformer": {"text_dim": 64}})},
    )
    network = model.model.diffusion_model
    for path, layer in network.named_modules():
        if isinstance(layer, pack.Ops.Linear):
            weight = layer.weight.data
            if path.startswith("blocks."):
                name = "Q4_0" if ".ffn." in path else "Q8_0"
                layer.weight = pack.made(packed(weight, name), NUMBERS[name], weight.shape)
            else:
                layer.weight = pack.made(weight, 0, weight.shape)
    return model
