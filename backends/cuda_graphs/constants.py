"""Constants that a model makes on the processor and copies to the GPU in each call.

A captured copy reads its source at each replay, when such a source is gone. So it is put into our
own memory, which a captured call keeps: a value made without the GPU is the same in every call of
one signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ALIGNMENT = 64


class Constants(TorchFunctionMode):
    """While this is entered, in this thread, `tensor.to` from the CPU and `torch.tensor` for a GPU
    copy by way of memory that lives as long as its owner.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """Set up; nothing is kept yet.

        Args:
            memory: where constants are kept: bytes of the CPU, which the GPU may read at any time.
        """
        super().__init__()
        self._memory = memory
        self._used = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and (device := _target(*args, **kwargs)) is not None:
            source, *rest = args
            args = (self.kept(source, device), *rest)
        elif func is torch.tensor and (device := _on_gpu(kwargs.get("device"))) is not None:
            return self.kept(func(*args, **{**kwargs, "device": "cpu"}), device)
        return func(*args, **kwargs)

    def kept(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The same on the device, copied from our own memory."""
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        end = begin + source.numel() * source.element_size()
        if end > self._memory.numel():
            raise RuntimeError(f"the model copies {end >> 10} KiB from the processor in each call")
        self._used = end
        kept = self._memory[begin:end].view(source.dtype).view(source.shape)
        kept.copy_(source)
        return torch.empty(source.shape, dtype=source.dtype, device=device).copy_(
            kept, non_blocking=True
        )


def _target(source: Any, *args: Any, **kwargs: Any) -> torch.device | None:
    """Where a tensor of the CPU would be copied to; None for every other use of `tensor.to`."""
    if not isinstance(source, torch.Tensor) or source.device.type != "cpu":
        return None
    known = (str, torch.device, torch.Tensor)
    given = (*args, *kwargs.values())
    wanted = next((each for each in given if isinstance(each, known)), None)
    return _on_gpu(wanted.device if isinstance(wanted, torch.Tensor) else wanted)


def _on_gpu(wanted: Any) -> torch.device | None:
    """The device that is meant, None if it is not a GPU."""
    device = None if wanted is None else torch.device(wanted)
    return device if device is not None and device.type == "cuda" else None
