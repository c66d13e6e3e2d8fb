"""Small tensors that are elsewhere: copied to the device once an epoch, and kept there.

Such a copy, and the processor with it, waits for all earlier work of its stream. The host makes one
at each call for the scales of a quantised weight.
"""

from __future__ import annotations

import torch

#: In bytes: a quarter of a million scales.
MOST = 1 << 20


class SmallTensors:
    """Those of one model."""

    def __init__(self, device: torch.device) -> None:
        """Set up; none is kept yet.

        Args:
            device: to which they are copied.
        """
        self._device = device
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def bring(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's copy on the device, the same until `forget`; None if it is too large to
        be kept. To be called on the stream of the work that uses it.
        """
        if tensor.nbytes > MOST:
            return None
        known = self._kept.get(id(tensor))
        if known is None:  # it is kept alive, so no other tensor has its id
            known = self._kept[id(tensor)] = tensor, tensor.to(self._device)
        return known[1]

    def forget(self) -> None:
        """Keep none."""
        self._kept.clear()
