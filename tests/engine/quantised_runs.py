"""A small transformer of a quantised file, as the host runs it and through Compile Model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from warmgraph_backends.operators import host_layer
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import quantised

from .lab import Lab, sampled
from .transformer_runs import EXPECTED

File = dict[str, torch.Tensor]

#: An input in the middle between two numbers of a format goes to one or the other by its last bit:
#: the host's own image moves by up to 1.9e-3 when the last bit of its text's numbers does.
QUANTISED = 5e-3
#: The layer that tests change.
LAYER = "double_blocks.1.img_mlp.0"


def flux(
    form: str | Callable[[str], str], change: Callable[[File], Any] = lambda file: None
) -> Any:
    """A MODEL of a small Flux 1, by the host's loader, whose file was changed."""
    import comfy.sd

    file = quantised(transformers.weights("flux1"), form)
    change(file)
    return comfy.sd.load_diffusion_model_state_dict(file)


def layers_of(file: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of a file's quantised layers."""
    return [name.removesuffix(".comfy_quant") for name in file if name.endswith(".comfy_quant")]


def with_input_scales(file: File) -> None:
    """As files have it whose inputs were calibrated: one number for a layer, of either shape."""
    for n, name in enumerate(sorted(layers_of(file))):
        shape = (1,) if "mlp" in name or "ffn" in name else ()
        file[f"{name}.input_scale"] = torch.full(shape, 0.004 * (1 + n % 5))


def rounding(kind: str) -> Any:
    """A MODEL in fp8; of Wan one with scales of inputs, of Flux 1 one without, as most are."""
    if kind == "flux1":
        return flux("fp8_e4m3fn")
    return transformers.load_quantised(kind, "fp8_e4m3fn", change=with_input_scales)


def rounded_layers(compiled: Any) -> list[int]:
    """Of how many layers each graph of a compiled model rounds the input itself."""
    kinds = compiled.get_attachment("warmgraph").scope.kinds
    modules = [kind.graph.description.module for kind in kinds]
    return [len(list(host_layer.rounded_paths(module))) for module in modules]


class Flux:
    """A small Flux 1, or another transformer, as the host runs it, and through Compile Model."""

    def __init__(self, host: Host, lab: Lab, model: Any, kind: str = "flux1") -> None:
        self.host, self.lab, self.plain, self.kind = host, lab, model, kind
        self.ours = lab.compiled(model)

    def images(self, tokens: int = 13, *size: int) -> list[torch.Tensor]:
        """Ours and the host's, two steps each."""
        return [self.sample(model, tokens, *size) for model in (self.ours, self.plain)]

    def sample(self, model: Any, tokens: int = 13, *size: int) -> torch.Tensor:
        prompt = transformers.conditioning(self.kind, tokens)
        latent = transformers.latent(self.kind, *(size or (8, 8)))
        (image,) = sampled(self.host, [model], prompt, latent)
        return image

    def is_compiled(self) -> bool:
        report, places = self.lab.engine.report(self.ours), EXPECTED[self.kind].places
        assert report["regions"] == {"total": places, "compiled": places, "eager": 0}, report[
            "eager"
        ]
        assert report["calls"]["eager"] == 0 < report["calls"]["compiled"]
        return True

    def rounded(self) -> list[int]:
        return rounded_layers(self.ours)
