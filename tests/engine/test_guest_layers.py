"""Layers that another pack adds to a UNet while it samples are its own: named once, not counted."""

from __future__ import annotations

from typing import Any

import torch

from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .subject import Subject


class Motion(torch.nn.Module):
    """Mixes the images of a batch, as motion modules do; nothing of the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = torch.nn.Parameter(torch.tensor(0.3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.strength * x.mean(0, keepdim=True)


def with_motion(model: Any) -> Any:
    """A clone into whose first blocks two such layers are put for as long as it samples."""
    from comfy.patcher_extension import PatcherInjection

    layers = [Motion(), Motion()]

    def sequences(patcher: Any) -> list[Any]:
        unet = patcher.model.diffusion_model
        return [unet.input_blocks[1], unet.output_blocks[0]]

    def inject(patcher: Any) -> None:
        for sequence, layer in zip(sequences(patcher), layers, strict=True):
            sequence.append(layer)

    def eject(patcher: Any) -> None:
        for sequence in sequences(patcher):
            sequence.pop(len(sequence) - 1)

    clone = model.clone()
    clone.set_injections("motion", [PatcherInjection(inject=inject, eject=eject)])
    return clone


def test_added_layers_are_named_once_and_all_else_stays_compiled(lab: Lab, host: Host) -> None:
    xl = Subject(lab, host, "narrowxl")
    total = xl.report(xl.compiled)["regions"]["total"]
    eager = xl.sample(with_motion(xl.model), batch=2)
    assert relative(eager, xl.sample(xl.model, batch=2)) > 1e-3
    compiled = with_motion(xl.compiled)
    assert relative(xl.sample(compiled, batch=2), eager) < TOLERANCE
    report = xl.report(compiled)
    assert report["regions"] == {"total": total, "compiled": total, "eager": 0}
    owner = __name__.partition(".")[0]
    assert f"2 layers that other packs added run as they are: Motion of {owner}" in report["notes"]
    assert xl.sample(xl.compiled).isfinite().all()
    assert not [note for note in xl.report(xl.compiled)["notes"] if "Motion" in note]
