"""A small pack of other nodes' kind: it swaps the classes of a UNet's modules in place, by object
patches. Imports the host, so tests import it within a fixture.
"""

from __future__ import annotations

from typing import Any

import torch
from comfy.ldm.modules.attention import BasicTransformerBlock, SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import (
    ResBlock,
    TimestepEmbedSequential,
    UNetModel,
    Upsample,
    timestep_embedding,
)


class TunedResBlock(ResBlock):
    """Takes one argument more than the host gives."""

    def forward(self, x: torch.Tensor, emb: torch.Tensor, gain: float) -> torch.Tensor:
        result: torch.Tensor = super().forward(x, emb)
        return result * gain


class TunedBlock(BasicTransformerBlock):
    """Called as the host's, but another class."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = super().forward(x, *args, **kwargs)
        return result * 0.98


class TunedSequential(TimestepEmbedSequential):
    """Another class of the same code."""


class TunedUNet(UNetModel):
    """Gives its blocks what they take."""

    def _forward(
        self,
        x: torch.Tensor,
        timesteps: Any = None,
        context: Any = None,
        y: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        emb = self.time_embed(timestep_embedding(timesteps, self.model_channels).to(x.dtype))
        emb = emb if y is None else emb + self.label_emb(y)
        skips: list[torch.Tensor] = []

        def run(block: Any, h: torch.Tensor) -> torch.Tensor:
            for layer in block:
                if isinstance(layer, TunedResBlock):
                    h = layer(h, emb, 0.97)
                elif isinstance(layer, SpatialTransformer):
                    h = layer(h, context, transformer_options)
                elif isinstance(layer, Upsample):
                    h = layer(h, output_shape=skips[-1].shape)
                else:
                    h = layer(h)
            return h

        for block in self.input_blocks:
            x = run(block, x)
            skips.append(x)
        x = run(self.middle_block, x)
        for block in self.output_blocks:
            x = run(block, torch.cat([x, skips.pop()], dim=1))
        result: torch.Tensor = self.out(x)
        return result


SWAPS = {ResBlock: TunedResBlock, BasicTransformerBlock: TunedBlock, UNetModel: TunedUNet}


def swapped(model: Any, *, only: type | None = None) -> Any:
    """A clone on which each module's class of `SWAPS` is another while it is loaded."""
    clone = model.clone()
    root = model.get_model_object("diffusion_model")
    for name, _ in root.named_modules(prefix="diffusion_model"):
        own = model.get_model_object(f"{name}.__class__")
        if own in SWAPS and (only is None or own is only):
            clone.add_object_patch(f"{name}.__class__", SWAPS[own])
    return clone
