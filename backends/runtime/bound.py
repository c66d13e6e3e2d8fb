"""A root module as it was described: where its weights are, and what others changed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..device.gpu import is_gpu
from ..host_api.memory import room_for_weights
from ..plans.plan import Plan
from ..weights.addresses import AddressBook
from ..weights.fetching import ModelWeights
from .foreign import Foreign
from .kind import Kind


class Placement(NamedTuple):
    """Where a root module runs.

    Attributes:
        device: its load device.
        dtype: the dtype in which its operators compute.
        patches: the object patches that its patcher puts into it, by name.
    """

    device: torch.device
    dtype: torch.dtype
    patches: Mapping[str, Any]


class Bound:
    """What a root module's calls need while the host keeps it; made again with each description."""

    def __init__(
        self,
        root: torch.nn.Module,
        holder: Any,
        plan: Plan,
        kinds: Sequence[Kind],
        device: torch.device,
        dtype: torch.dtype,
        *,
        whole_calls: bool,
        together: bool,
        weights_ahead: bool,
    ) -> None:
        """Remember how things are now.

        Args:
            holder: the module on which the host's patcher notes where the weights are.
            dtype: the dtype in which its operators compute.
            whole_calls: whether whole calls may be captured.
            together: of `ModelWeights`.
            weights_ahead: whether a region's weights may be loaded while the previous region
                computes.
        """
        self.device, self.dtype = device, dtype
        self.weights = ModelWeights(
            holder,
            device,
            dtype,
            together=together,
            room=room_for_weights(device) if weights_ahead else None,
        )
        #: Where weights lie, for captured calls; None where there are none.
        self.book = AddressBook(root, self.weights) if is_gpu(device) else None
        self.foreign = Foreign(root, plan, kinds, device, whole_calls=whole_calls)

    def is_for(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the description still holds."""
        return device == self.device and dtype is self.dtype and not self.foreign.is_stale()

    def begin_run(self) -> None:
        """Inspect the model again: what other nodes do, and where its weights are now."""
        self.weights.begin_run()
        self.foreign.look()

    def end_run(self) -> None:
        """Forget what only the run needed."""
        self.weights.end_run()
        if self.book is not None:
            self.book.forget()
