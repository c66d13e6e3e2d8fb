"""What PyTorch lets only itself do with a GPU."""

from __future__ import annotations

from typing import Any

import torch


def pause(cycles: int) -> None:
    """Have the current CUDA stream do nothing for so many cycles of the GPU."""
    sleep: Any = torch.cuda._sleep
    sleep(cycles)
