"""What PyTorch keeps private about CUDA streams; the rest is in `device`."""

from __future__ import annotations

from typing import Any

import torch


def pause(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many GPU cycles."""
    sleep: Any = torch.cuda._sleep
    sleep(cycles)


def current_stream(device: int) -> int:
    """Return a GPU's current stream as CUDA knows it; the public call costs as much as a launch."""
    private: Any = torch._C
    ask = getattr(private, "_cuda_getCurrentRawStream", None)
    if ask is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(ask(device))
