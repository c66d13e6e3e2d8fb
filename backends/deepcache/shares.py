"""The share of a UNet's arithmetic in its outer blocks, for each branch at which it may be cut.

Counted from the modules: products of convolutions, linear layers and attention, at the size that
such a model is made for. GPU time is not arithmetic: a report says what was saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..host_api.unets import classes

_PROMPT_TOKENS = 77


def shares(unet: Any) -> list[float]:
    """Return the share of a whole step that a shallow one computes, for each branch from the
    outermost.

    Args:
        unet: the host's UNetModel.
    """
    side = (512 if unet.num_classes is None else 1024) // 8  # SDXL's images are larger
    inputs = []
    for block in unet.input_blocks:
        cost, side = _cost(block, side)
        inputs.append(cost)
    middle, side = _cost(unet.middle_block or (), side)
    outputs = []
    for block in unet.output_blocks:
        cost, side = _cost(block, side)
        outputs.append(cost)
    head, _ = _cost([unet.out], side)
    total = sum(inputs) + middle + sum(outputs) + head
    outer, found = head, []
    for entry, leave in zip(inputs, reversed(outputs), strict=False):
        outer += entry + leave
        found.append(outer / total)
    return found


def _cost(layers: Iterable[Any], side: int) -> tuple[float, int]:
    """Multiplications of one block at a side of its input in latent pixels, and its output's."""
    host = classes()
    cost = 0.0
    for layer in layers:
        if isinstance(layer, host.down):
            side = -(-side // 2)
        elif isinstance(layer, host.up):
            side *= 2
        pixels = side * side
        if isinstance(layer, host.transformer):
            cost += _transformer(layer, pixels)
        elif isinstance(layer, host.residual):
            cost += _weights(layer, without=(layer.emb_layers,)) * pixels
        else:
            cost += _weights(layer) * pixels
    return cost, side


def _transformer(transformer: Any, pixels: int) -> float:
    cost = 0.0
    for block in transformer.transformer_blocks:
        prompt = (block.attn2.to_k, block.attn2.to_v)
        cost += _weights(block, without=prompt) * pixels
        cost += sum(map(_weights, prompt)) * _PROMPT_TOKENS
        width = block.attn1.to_q.weight.shape[0]
        cost += 2 * width * pixels * (pixels + _PROMPT_TOKENS)
    return cost + (_weights(transformer.proj_in) + _weights(transformer.proj_out)) * pixels


def _weights(module: Any, without: Iterable[Any] = ()) -> float:
    """Elements of all weights of two and more dimensions in a module."""
    left_out = {id(p) for other in without for p in other.parameters()}
    return float(
        sum(
            p.numel()
            for p in module.parameters()
            if isinstance(p, torch.Tensor) and p.dim() > 1 and id(p) not in left_out
        )
    )
