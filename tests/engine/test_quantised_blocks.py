"""Quantised blocks of each sort: every format in every size, with a LoRA."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_tools import checkpoints
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import FORMATS, quantised

from .lab import Lab, Probe, relative
from .quantised_runs import QUANTISED

pytestmark = pytest.mark.slow


class Sizes(NamedTuple):
    """What a call is made of: a latent's sides, how many images, tokens of text."""

    height: int
    width: int
    batch: int = 1
    tokens: int = 13
    frames: int = 1


SIZES = (
    Sizes(8, 8),
    Sizes(8, 8, batch=4),
    Sizes(9, 11, frames=3),
    Sizes(12, 10, batch=2, tokens=300),
)


class Model:
    """A small quantised model under a probe, with Compile Model inside the probe."""

    def __init__(self, host: Host, lab: Lab, kind: str, model: Any, layer: str) -> None:
        self.host, self.lab, self.kind = host, lab, kind
        self.key = f"diffusion_model.{layer}.weight"
        self.probe = Probe()
        self.ours = lab.compiled(self.probe.attach(model))
        weight = model.model.diffusion_model.get_submodule(layer).weight
        generator = torch.Generator().manual_seed(9)
        self.lora = 0.1 * torch.randn(weight.shape, generator=generator)

    def conditioning(self, tokens: int, seed: int) -> Any:
        if self.kind != "narrow15":
            return transformers.conditioning(self.kind, tokens, seed=seed)
        text = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(seed))
        return [[text, {}]]

    def latent(self, sizes: Sizes) -> Any:
        if self.kind == "narrow15":
            return {"samples": torch.zeros(sizes.batch, 4, sizes.height, sizes.width)}
        height, width, batch, _, frames = sizes
        return transformers.latent(self.kind, height, width, batch=batch, frames=frames)

    def sample(self, sizes: Sizes, strength: float | None = None) -> torch.Tensor:
        """One step; each call is compared with the host's on the same weights."""
        model = self.ours
        if strength is not None:
            model = model.clone()
            assert model.add_patches({self.key: ("diff", (self.lora,))}, strength) == [self.key]
        positive, negative = (self.conditioning(sizes.tokens, seed) for seed in (1, 2))
        options = {"latent": self.latent(sizes), "steps": 1, "cfg": 3.0}
        image: torch.Tensor = self.host.sample(model, positive, negative, **options)
        assert image.isfinite().all()
        return image

    def check(self, tolerance: float) -> None:
        """Every size and strength was all compiled and the host's within tolerance; no build."""
        built = self.lab.builds()
        before, *_ = (self.sample(sizes) for sizes in SIZES)
        changed = [self.sample(SIZES[0], strength) for strength in (1.0, 0.5)]
        assert torch.equal(self.sample(SIZES[0]), before), "the LoRA is off"
        assert max(call.error for call in self.probe.calls) < tolerance
        assert relative(changed[0], before) > 2 * tolerance
        assert relative(changed[0], changed[1]) > tolerance < relative(changed[1], before)
        report = self.lab.engine.report(self.ours)
        assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
        assert report["calls"]["compiled"] > 0 and self.lab.builds() == built
        assert len({call.shape[0] for call in self.probe.calls}) >= 3
        assert max(call.tokens for call in self.probe.calls) >= 300


#: The layer that a LoRA changes.
BLOCKS = {"zimage": "layers.1.feed_forward.w1", "wan": "blocks.1.ffn.0"}


@pytest.mark.parametrize("form", list(FORMATS))
@pytest.mark.parametrize("kind", list(BLOCKS))
def test_every_format_in_every_size_with_a_lora(
    host: Host, shared: Lab, kind: str, form: str
) -> None:
    shared.compiled(transformers.load_quantised(kind, "int8"))
    built = shared.builds()
    model = transformers.load_quantised(kind, form)
    layer = model.model.diffusion_model.get_submodule(BLOCKS[kind])
    assert layer.quant_format == FORMATS[form].marks["format"]
    coarse = 6 if form == "convrot_w4a4" else 3  # inputs of four bits go by the last bit, too
    Model(host, shared, kind, model, BLOCKS[kind]).check(coarse * QUANTISED)
    assert shared.builds() == built, "the graphs of another format"


def is_of_a_transformer_block(name: str, weight: torch.Tensor) -> bool:
    """As files of UNets have it: convolutions keep their precision."""
    return ".transformer_blocks." in name and name.endswith("weight") and weight.dim() == 2


def unet(host: Host, form: str) -> Any:
    """A MODEL of an SD1.5 file whose UNet has quantised layers, by the host's loader."""
    name = f"narrow15-{form}.safetensors"
    file = quantised(checkpoints.make("narrow15"), form, takes=is_of_a_transformer_block)
    checkpoints.write(file, host.base / "models" / "checkpoints" / name)
    return host.nodes.CheckpointLoaderSimple().load_checkpoint(name)[0]


@pytest.mark.parametrize("form", ["int8", "fp8_e4m3fn", "fp8_e5m2", "mxfp8"])
def test_every_format_of_a_unet_in_every_size_with_a_lora(
    host: Host, shared: Lab, form: str
) -> None:
    shared.compiled(unet(host, "int8"))
    built = shared.builds()
    model = unet(host, form)
    layer = "middle_block.1.transformer_blocks.0.attn1.to_q"
    assert (
        model.model.diffusion_model.get_submodule(layer).quant_format
        == FORMATS[form].marks["format"]
    )
    Model(host, shared, "narrow15", model, layer).check(QUANTISED)
    assert shared.builds() == built, "the graphs of another format"
