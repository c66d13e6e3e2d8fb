"""What PyTorch lets only itself do with a CUDA stream; all else is in `device`."""

from __future__ import annotations

from typing import Any

import torch


def pause(cycles: int) -> None:
    """Have the current CUDA stream do nothing for so many cycles of the GPU."""
    sleep: Any = torch.cuda._sleep
    sleep(cycles)


def current_stream(device: int) -> int:
    """Return the current stream of a GPU as CUDA knows it; `torch.cuda.current_stream` takes the
    processor as long as a launch does.
    """
    private: Any = torch._C
    ask = getattr(private, "_cuda_getCurrentRawStream", None)
    if ask is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(ask(device))
