"""The host's dynamic VRAM in main memory: its own functions work on pages of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .quantised_runs import Flux


class Range:
    """Counts as the host's `ModelVBAR` does: each fault holds all pages once more."""

    base_addr, offset, max_size = 4096, 100, 1000

    def __init__(self) -> None:
        self.pins = 0
        self.floor = 0
        self.faults = 0
        self.fits = True
        self.given_up = 0

    def fault(self, address: int, size: int) -> list[int] | None:
        assert (address, size) == (self.base_addr, self.offset)
        self.faults += 1
        self.pins += self.fits
        return [7] if self.fits else None

    def unpin(self, address: int, size: int) -> None:
        assert (address, size) == (self.base_addr, self.offset)
        self.pins -= 1

    def set_watermark_limit(self, size: int) -> None:
        self.floor = size

    def free_memory(self, size: int) -> None:
        self.given_up += size


class Memory(Range):
    """A range with memory, of which each module has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = torch.zeros(1 << 16, dtype=torch.uint8)

    def fault(self, address: int, size: int) -> Any:
        self.pins += 1
        return bytearray(b"page")

    def unpin(self, address: int, size: int) -> None:
        self.pins -= 1


class Pages(Memory):
    """Of all layers of a model; counts how often one asks for its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bytes = torch.zeros(size, dtype=torch.uint8)
        self.asked = 0

    def fault(self, address: int, size: int) -> Any:
        self.asked += 1
        return super().fault(address, size)


class Patch:
    """What the host hangs on a layer under a LoRA: it changes the weight once, where that lies."""

    is_lowvram_patch = True

    def memory_required(self) -> int:
        return 64

    def prepare(self, *_: Any, **__: Any) -> None:
        pass

    def clear_prepared(self) -> None:
        pass


class Scaled(Patch):
    """Multiplies it, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 1.5 * weight


def elsewhere(weight: Any) -> Any:
    """The same quantised weight, said to lie on a GPU: its numbers are where they were."""
    made = torch.Tensor._make_wrapper_subclass(
        type(weight), weight.shape, device="cuda:0", dtype=weight.dtype
    )
    type(weight).__init__(made, weight._qdata, weight._layout_cls, weight._params)
    return made


class Paged:
    """The quantised layers of a model, whose weights the host brings to pages at each call."""

    def __init__(self, model: Any) -> None:
        from comfy import memory_management

        self.layers = [
            layer
            for layer in model.model.diffusion_model.modules()
            if getattr(layer, "quant_format", None)
        ]
        sizes = [
            memory_management.vram_aligned_size([layer.weight, layer.bias]) for layer in self.layers
        ]
        self.pages = Pages(sum(sizes))
        start = 0
        for layer, size in zip(self.layers, sizes, strict=True):
            layer._v, layer.seed_key = (self.pages, start, size), f"at {start}"
            layer._parameters["weight"] = elsewhere(layer.weight)
            start += size
        self.empty()

    def empty(self) -> None:
        """As after others needed the room."""
        for layer in self.layers:
            layer._v_signature = None

    def sample(self, run: Flux, model: Any) -> torch.Tensor:
        """Two steps: each layer asks for its pages once in each, and lets them go."""
        self.pages.asked = 0
        image = run.sample(model)
        assert self.pages.asked == 2 * len(self.layers) and self.pages.pins == 0
        return image


def in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host's own functions for dynamic VRAM work in main memory."""
    import comfy.pinned_memory
    import comfy_aimdo.torch

    def tensor(place: Any, device: torch.device) -> torch.Tensor:
        part: torch.Tensor = place[0].bytes[place[1] : place[1] + place[2]]
        return part

    monkeypatch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", tensor)
    monkeypatch.setattr(comfy.pinned_memory, "get_pin", lambda *_, **__: None)
    monkeypatch.setattr(comfy.pinned_memory, "pin_memory", lambda *_, **__: False)
