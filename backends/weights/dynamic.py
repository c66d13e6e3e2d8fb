"""Weights in the host's dynamic VRAM, at virtual addresses that are fixed for the model's life."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..host_api import dynamic_vram
from .source import Brought, NoRoomError, Pairs, WeightSource, same_device
from .streamed import Streamed


class Dynamic(WeightSource):
    """The weights of one model: one call holds its whole range, or modules are loaded there by the
    host's own functions, several at once.
    """

    name = "dynamic"
    holds = True

    def __init__(
        self, model: Any, device: torch.device, dtype: torch.dtype, *, may_hold: bool = True
    ) -> None:
        """Set up; nothing is held yet.

        Args:
            model: the host's BaseModel.
            device: where it computes.
            dtype: in which dtype it computes.
            may_hold: whether its range may be held, which depends on many host internals.
        """
        self._model, self._device, self._dtype = model, device, dtype
        self._fits = self._may_hold = may_hold
        self._pages: Any = None  # while they are held
        self._held = 0
        self._holders = 0
        self._signature = b""

    def takes(self, module: Any) -> bool:
        if not dynamic_vram.has_place(module):
            return False
        weight = getattr(module, "weight", None)
        return weight is not None and not same_device(weight.device, self._device)

    def fetch(self, modules: Sequence[Any]) -> Brought:
        """See the protocol; what does not stay in place after the call counts as streamed."""
        device, dtype = self._device, self._dtype
        fresh = [m for m in modules if not dynamic_vram.is_begun(m)]
        found: Pairs = {}
        stream = None
        failure: Exception | None = None
        held = [m for m in modules if dynamic_vram.holds_pages(m)]
        try:
            stream = dynamic_vram.begin_copies(fresh, held, dtype, device)
            dynamic_vram.await_copies(device, stream)
            for module in modules:
                found[id(module)] = dynamic_vram.end_copy(module, dtype, device)
        except Exception as error:  # any kind: what is held must be released
            failure = error
            for module in modules:
                # The host notes a page as good before a LoRA is applied to what lies there.
                if not dynamic_vram.is_there(module):
                    dynamic_vram.mark_empty(module)
        for module in fresh:
            dynamic_vram.forget_copy(module)
        release = dynamic_vram.releaser(held, device, stream)
        if failure is not None:
            release()
            if not isinstance(failure, (RuntimeError, MemoryError)):
                raise failure
            raise NoRoomError(f"they could not be brought over together: {failure}") from failure
        stays = len(held) == len(modules) and all(
            dynamic_vram.lie_in_place(m, found[id(m)]) for m in modules
        )
        return Brought(found, self.name if stays else Streamed.name, stays, release)

    def hold(self) -> bytes | None:
        """Load the model's whole range and hold its pages.

        Pages must not be held for longer than a call: the host makes room for a step's activations
        by taking unheld pages.

        Returns:
            The signature of the pages, None when they do not all fit or there is no such range.
        """
        if self._holders:  # the pages cannot have changed since
            self._holders += 1
            return self._signature
        if not self._fits:
            return None
        pages, size = dynamic_vram.page_range(self._model, self._device)
        if not size:
            return None
        signature = dynamic_vram.hold(pages, size)
        if signature is None:
            self._fits = False  # until the next run; weights are loaded one region at a time
            return None
        self._pages, self._held, self._holders, self._signature = pages, size, 1, signature
        return signature

    def release(self) -> None:
        """Undo one `hold` that returned a signature; the last one releases the pages.

        Pages are held once, for any number of holders: the host counts, and a page whose count does
        not return to zero is never freed.
        """
        self._holders = max(0, self._holders - 1)
        if self._holders == 0 and self._held:
            dynamic_vram.let_go(self._pages, self._held)
            self._pages, self._held = None, 0

    def make_room(self, size: int) -> None:
        pages, used = dynamic_vram.page_range(self._model, self._device)
        if used and not self._holders:
            dynamic_vram.give_up(pages, size)

    def begin_run(self) -> None:
        self._fits = self._may_hold
        if self._holders:  # an exception came between
            self._holders = 1
            self.release()

    # --- for captured calls, which read a module's weights at its place --------------------------

    has = staticmethod(dynamic_vram.has_place)
    mark = staticmethod(dynamic_vram.mark)

    def empty(self, modules: Iterable[Any]) -> frozenset[int]:
        """Return the ids of modules that are not loaded."""
        return frozenset(id(m) for m in modules if self.has(m) and self.mark(m) is None)

    def places(self, modules: Iterable[Any]) -> frozenset[tuple[int, int]]:
        """Return the address and the size of each module's place."""
        return frozenset(map(dynamic_vram.place, modules))

    def are_filled(self, modules: Sequence[Any]) -> bool:
        """Tell whether each module's weights are in place; to be called while the range is held."""
        return dynamic_vram.are_filled(modules)

    def undo(self, modules: Iterable[Any], marks: Sequence[Any]) -> None:
        """Have the host load again what it loaded, or began to, since these marks."""
        for module, mark in zip(modules, marks, strict=True):
            dynamic_vram.undo_copy(module, mark)
