"""The addresses of a model's weights, for captured CUDA graphs.

A CUDA graph reads weights at the addresses that they had when it was captured. Two regimes:

- without dynamic VRAM, every parameter has an address until a load, an unload or a LoRA;
- under dynamic VRAM a module's range keeps its address for the model's life, but its contents are
  right only while the pages are those that the host filled. The few small parameters that the host
  loads outside that range get new addresses at each load; a captured graph keeps the old tensors,
  and the new values are copied into them.

Nothing here keeps weights outside of dynamic VRAM alive beyond a run: the host may load the model
again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..host_api import formats, gguf
from ..host_api.layers import has_functions
from ..reasons import Reason, of
from .fetching import ModelWeights
from .source import same_device
from .streamed import parts_of

MOVED = of("moved")


class Addresses(NamedTuple):
    """The weights at one moment.

    Attributes:
        loose: the parameters and buffers on the device, outside dynamic VRAM; of a quantised one,
            its parts.
        pointers: their addresses.
        places: address and size of each module in dynamic VRAM that the host filled.
        pages: the signature of their pages; None without dynamic VRAM.
        takes_memory_by_stream: whether a library allocates memory for each stream for their
            products.
    """

    loose: list[torch.Tensor]
    pointers: list[int]
    places: frozenset[tuple[int, int]]
    pages: bytes | None
    takes_memory_by_stream: bool


class AddressBook:
    """Watches the weights of one root module; asked once a step."""

    def __init__(self, root: torch.nn.Module, weights: ModelWeights) -> None:
        """Set up; no address is known yet.

        Args:
            root: the module whose calls are captured.
            weights: where its model's weights are.
        """
        #: Where they are used.
        self.device = weights.device
        self._weights = weights
        self._dynamic = weights.dynamic
        self._modules: list[Any] = list(root.modules())
        self._epoch = -1
        self._addresses: Addresses | None = None
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._found: list[torch.Tensor] = []
        self._idle: frozenset[int] = frozenset()
        #: Why nothing can be captured or replayed now.
        self.problem: Reason | None = MOVED

    @property
    def epoch(self) -> int:
        """Changes when weights are moved or replaced."""
        return self._weights.epoch

    def look(self) -> Addresses | None:
        """Return the weights' addresses, or None while a graph could not read them.

        To be called at the start of a step, after `ModelWeights.begin_step`.
        """
        if self._epoch == self._weights.epoch and self._still():
            return self._addresses
        self._epoch = self._weights.epoch
        self._addresses = None
        self._addresses = self._find()
        return self._addresses

    def settle(self) -> None:
        """Note after a step by the host's own calls which modules it left alone."""
        idle = self._dynamic.empty(self._modules)
        if idle != self._idle:
            self._idle = idle
            self._move()

    def forget(self) -> None:
        """Release all weights, after a run."""
        self._slots, self._found = [], []
        self._move()

    def hold(self, addresses: Addresses) -> bool:
        """Keep the pages in place; `let_go` must follow if this is true."""
        if addresses.pages is None:
            return True
        signature = self._dynamic.hold()
        if signature is None:
            return False
        if signature != addresses.pages:
            self._dynamic.release()
            self._move()
            return False
        return True

    def let_go(self, addresses: Addresses) -> None:
        """Undo `hold` once the work is queued."""
        if addresses.pages is not None:
            self._dynamic.release()

    def marks(self) -> list[Any]:
        """Marks that tell whether the host has loaded a module's weights meanwhile."""
        return [self._dynamic.mark(m) for m in self._modules]

    def undo(self, marks: Sequence[Any]) -> None:
        """Have the host load again what it loaded, or began to, since these marks: within a capture
        it may not have been done.
        """
        self._dynamic.undo(self._modules, marks)
        self._move()

    def _move(self) -> None:
        self._addresses, self.problem = None, MOVED

    def _still(self) -> bool:
        """Whether the last addresses still hold within an epoch."""
        if self._addresses is None:
            return self.problem is not None and not self.problem.fleeting
        live = [table.get(name) for table, name in self._slots]
        return all(map(operator.is_, live, self._found))

    def _find(self) -> Addresses | None:
        device = self._weights.device
        fixed, slots = [], []
        found: list[torch.Tensor] = []
        loose: list[torch.Tensor] = []
        by_stream = False
        for module in self._modules:
            if has_functions(module):
                self.problem = of("computed_anew")
                return None
            form = formats.of(module)
            if form is not None:
                if not form.may_be_captured:
                    self.problem = of("format_not_replayed", format=form.name)
                    return None
                by_stream |= form.takes_memory_by_stream
            dynamic = self._dynamic.has(module)
            if dynamic and not (self._dynamic.mark(module) is None and id(module) in self._idle):
                fixed.append(module)
            own = gguf.plain_parts(module)
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None or (dynamic and not same_device(tensor.device, device)):
                        continue
                    parts = [own[name]] if name in own else parts_of(tensor)
                    if not all(same_device(part.device, device) for part in parts or [tensor]):
                        self.problem = of("not_in_vram")
                        return None
                    if parts is None:
                        self.problem = of("special_weights", sort=type(tensor).__name__)
                        return None
                    slots.append((table, name))
                    found.append(tensor)
                    loose += parts
        pages = None
        if fixed:
            pages = self._pages(fixed)
            if pages is None:
                return None
        self._slots, self._found = slots, found
        self.problem = None
        places = self._dynamic.places(fixed)
        pointers = [tensor.data_ptr() for tensor in loose]
        return Addresses(loose, pointers, places, pages, by_stream)

    def _pages(self, fixed: list[Any]) -> bytes | None:
        """The signature of the range, if all modules' weights there are those that the host put
        there.
        """
        signature = self._dynamic.hold()
        if signature is None:
            self.problem = of("does_not_fit")
            return None
        try:
            if not self._dynamic.are_filled(fixed):
                self.problem = MOVED
                return None
            return signature
        finally:
            self._dynamic.release()
