"""A piece of a video within a region of LTX's VAE: which frames its convolutions take, kept frames
included, and stand-ins for the host's layers that would join them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..plans.plan import Passage, host_forward

#: Frames that a convolution over three of them keeps from one piece to the next.
KEPT = 2
#: Where videos lie along their frames.
FRAMES = 2


def mirrors(convolution: Any) -> bool:
    return bool(convolution.conv.padding_mode == "reflect")


def picked(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Frames of a video by index; missing ones have any content."""
    return x.index_select(FRAMES, index.clamp(min=0))


def _by_channels(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


class FrameConvolution:
    """One convolution of a block within a region: the frames it picks, had kept, and keeps."""

    def __init__(self, convolution: Any, index: torch.Tensor, kept: torch.Tensor) -> None:
        self.layer = convolution.conv
        self.mirrors = mirrors(convolution)
        self.index = index
        self.kept = kept
        self.keeps: torch.Tensor | None = None

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        return picked(x, self.index)

    def convolve(self, picked: torch.Tensor) -> torch.Tensor:
        """Put in the kept frames and convolve."""
        more = self.index.shape[0] - KEPT
        kept = torch.nn.functional.pad(self.kept, (0, 0, 0, 0, 0, more))
        is_kept = (self.index < 0).reshape(1, 1, -1, 1, 1)
        taken = _by_channels(torch.where(is_kept, kept, picked))
        self.keeps = taken[:, :, more:].clone()
        if not self.mirrors:
            return host_forward(self.layer, taken)
        # The layer would do the same, and leave the result's order in memory to the compiler.
        layer = copy.copy(self.layer)
        layer.padding, layer.padding_mode = (0, 0, 0), "zeros"
        taken = torch.nn.functional.pad(taken, (1, 1, 1, 1, 0, 0), mode="reflect")
        return host_forward(layer, _by_channels(taken))


class PickedNorm(Passage):
    """A norm of a region, on the frames that the next convolution takes."""

    def __init__(self, norm: torch.nn.Module, way: FrameConvolution) -> None:
        super().__init__()
        self.norm = norm
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return host_forward(self.norm, self.way.pick(x))


class Convolution(Passage):
    """A causal convolution of a region, on picked frames or all it is given."""

    def __init__(self, way: FrameConvolution, given: torch.Tensor | None = None) -> None:
        super().__init__()
        self.way = way
        self.given = given

    def forward(self, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
        return self.way.convolve(x if self.given is None else self.way.pick(self.given))


class Given(Passage):
    """Gives what is known already."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.value


class Kept:
    """The host's per-thread cache within a region: holds one value or nothing, ignores writes."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def get(self, _: int, default: Any = None) -> Any:
        return default if self.value is None else self.value

    def __setitem__(self, thread: int, value: Any) -> None:
        pass
