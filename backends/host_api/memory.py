"""What the host has loaded where, free memory, and entries in its list of loaded models.

Relies on the host's `comfy/model_management.py` and `comfy/model_patcher.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..device.gpu import free_and_total_bytes, is_gpu, pretended

_SAMPLING_VRAM = 2 << 30


def default_device() -> torch.device:
    import comfy.model_management

    device: torch.device = comfy.model_management.get_torch_device()
    return device


def total_vram(device: torch.device) -> int:
    """Bytes of the device's memory, as the host counts them."""
    import comfy.model_management

    return int(comfy.model_management.get_total_memory(device))


def spare_vram(patchers: Iterable[Any]) -> int | None:
    """Return the bytes of VRAM, on the card with least, that sampling with these models leaves
    free; None without a real GPU.
    """
    models = {id(p.model): p for p in patchers if is_gpu(p.load_device)}
    if not models or pretended() is not None:
        return None
    to_load: Counter[torch.device] = Counter()
    for patcher in models.values():
        to_load[patcher.load_device] += max(0, patcher.model_size() - patcher.loaded_size())
    spare = (free_and_total_bytes(card)[0] - wanted for card, wanted in to_load.items())
    return max(0, int(min(spare) - _SAMPLING_VRAM))


def room_for_weights(device: torch.device) -> Callable[[], int] | None:
    """Return a function of a device's free bytes beyond the host's reserve; None where the host
    does not copy weights beside queued work (no known GPU, --disable-async-offload).
    """
    import comfy.model_management as management

    if not is_gpu(device) or not management.NUM_STREAMS:
        return None
    return lambda: int(management.get_free_memory(device) - management.minimum_inference_memory())


def empty_cache() -> None:
    """Return PyTorch's cached memory to the device."""
    import comfy.model_management

    comfy.model_management.soft_empty_cache()


def loaded_state(model: Any) -> tuple[Any, ...]:
    """Return what changes once the host loads, moves or patches a model (`ModelPatcher.load`)."""
    return (
        getattr(model, "device", None),
        getattr(model, "model_loaded_weight_memory", None),
        patches_of(model),
        getattr(model, "model_lowvram", None),
    )


def patches_of(model: Any) -> Any:
    """Return what changes once the host puts other patches on a model's weights."""
    return getattr(model, "current_weight_patches_uuid", None)


class LoadedEntry:
    """An entry in the host's list of loaded models, to have it free memory that is no model's."""

    def __init__(
        self, device: torch.device, used_bytes: Callable[[], int], give_back: Callable[[], int]
    ) -> None:
        """Set up, not yet listed.

        Args:
            device: where the memory lies.
            used_bytes: how much it is.
            give_back: frees it all and returns the bytes.
        """
        self._facts = device, used_bytes, give_back
        self._patcher: Any = None  # the host's list holds it by a weak reference only
        self._loaded: Any = None

    def list(self) -> None:
        """Enter the list, unless in it."""
        import comfy.model_management as management

        if self._loaded is None or self._loaded not in management.current_loaded_models:
            self._patcher = _patcher(*self._facts)
            self._loaded = management.LoadedModel(self._patcher)
            self._loaded.model_load()
            self._loaded.currently_used = False  # nobody may load it along with what is
            management.current_loaded_models.insert(0, self._loaded)


def _patcher(
    device: torch.device, used_bytes: Callable[[], int], give_back: Callable[[], int]
) -> Any:
    """Return the patcher that the host asks about this memory."""
    from comfy.model_patcher import ModelPatcher

    class HeldMemoryPatcher(ModelPatcher):  # type: ignore[misc]
        """Represents memory; has no weights."""

        def model_size(self) -> int:
            return used_bytes()

        def loaded_size(self) -> int:
            return used_bytes()

        def current_loaded_device(self) -> torch.device:
            return device

        def partially_load(self, *_: Any, **__: Any) -> int:
            return 0

        def partially_unload(self, *_: Any, **__: Any) -> int:
            return give_back()

        def detach(self, unpatch_all: bool = True) -> Any:
            if unpatch_all:
                give_back()
            return self.model

    return HeldMemoryPatcher(torch.nn.Module(), device, torch.device("cpu"))
