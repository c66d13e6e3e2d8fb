"""All use of devices through PyTorch: apart from this room, `cuda_graphs/`, `kernels/` and
PyTorch's private names nothing names a sort of GPU.

A function without a device argument means the current one of its type.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from .kinds import AMD, CPU, CUDA, GPU_TYPES, KINDS, NVIDIA, DeviceKind, other

#: What the answer of a GPU that is only pretended is marked with.
PRETENDED = "warmgraph_pretends"


@cache  # a device makes the text each time
def type_of(device: torch.device) -> str:
    """Return a device's type."""
    return device.type


@cache  # reading a device's type takes microseconds
def is_gpu(device: torch.device | str) -> bool:
    """Tell whether a device, or a type of devices, is a GPU for us: `DeviceKind.has_queue`."""
    return (device if isinstance(device, str) else device.type) in GPU_TYPES


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the sort of a device, or of a device type, for this PyTorch."""
    return _kind(device, torch.version.cuda, torch.version.hip)


@cache
def _kind(device: torch.device | str, cuda: str | None, hip: str | None) -> DeviceKind:
    """Return the row of a type; PyTorch is built for one of the two that it calls "cuda"."""
    type = device if isinstance(device, str) else device.type
    built_for = NVIDIA if cuda is not None else AMD if hip is not None else ""
    fit = (k for k in KINDS if k.type == type and (type != CUDA or k.vendor == built_for))
    return next(fit, other(type))


def is_there(type: str = CUDA) -> bool:
    """Tell whether there is a device of a type that graphs may be compiled for."""
    return type == CPU or (type in GPU_TYPES and torch.cuda.is_available())


def compiled_for() -> str:
    """Return the type of device that models are compiled for here by default."""
    return CUDA if is_there() and kind_of(CUDA).has_packed_kernels else CPU


def name(device: torch.device | None = None) -> str:
    """Return the name of a GPU, or of the processor without one."""
    if not torch.cuda.is_available():
        return platform.processor()
    return torch.cuda.get_device_name(device if device is None else index(device))


def sort_of(device: torch.device) -> str:
    """Return a card's name if it differs from the first one's; else ""."""
    if not is_gpu(device) or not index(device):
        return ""
    found = name(device)
    return "" if found == name(torch.device(device.type, 0)) else found


def pretended() -> str | None:
    """Return the architecture of the GPU that this process pretends to have, on which nothing can
    be computed (`torch_api.cuda_pretended`); None otherwise.
    """
    return getattr(torch.cuda.get_device_properties, PRETENDED, None)


def machine() -> str:
    """Return a name for this machine's device, for what is remembered of it."""
    return f"{platform.node()}/{name()}/{sys.platform}"


def capability(card: int | None = None) -> str:
    """Return the compute capability of a GPU, for example "9.0".

    Args:
        card: its number; None: the current one.
    """
    return ".".join(map(str, torch.cuda.get_device_capability(card)))


def has_int8_cores(device: torch.device) -> bool:
    """Tell whether a GPU has cores for int8 matrices that Triton knows."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def toolkit() -> str | None:
    """Return the version of CUDA or HIP that this PyTorch was built with."""
    return torch.version.cuda or torch.version.hip


def current_index() -> int:
    """Return the number of the current GPU; 0 without one."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def count(type: str) -> int:
    """Return how many devices of a type there are for graphs; the processor is one."""
    return torch.cuda.device_count() if is_gpu(type) else 1


def index(device: torch.device) -> int:
    """Return the number of a GPU; 0 for any other device."""
    if not is_gpu(device):
        return 0
    return current_index() if device.index is None else device.index


@contextlib.contextmanager
def in_use(card: int) -> Iterator[None]:
    """Within this a GPU is this thread's current one, for its driver, too; nothing changes without
    one.
    """
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.device(card):
        torch.cuda.mem_get_info(card)  # from then on its context is the thread's
        yield


def current() -> torch.device | None:
    """Return the current GPU; None without one."""
    return torch.device(CUDA, torch.cuda.current_device()) if torch.cuda.is_available() else None


# --- its memory ------------------------------------------------------------------------------


def free_and_total_bytes(device: torch.device | None = None) -> tuple[int, int]:
    """Return a GPU's free memory, without what PyTorch caches, and its total memory."""
    return torch.cuda.mem_get_info(device)


def shared_memory_bytes(device: torch.device) -> int:
    """Return how much shared memory a block of threads may have on a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def empty_cache() -> None:
    """Free the GPU memory that PyTorch only caches."""
    torch.cuda.empty_cache()


# --- its queue -------------------------------------------------------------------------------


def synchronize(device: torch.device | None = None) -> None:
    """Wait for all queued work of a GPU."""
    torch.cuda.synchronize(device)


def new_stream(device: torch.device) -> Any:
    """Return one of PyTorch's streams, which others may have, too."""
    make: Any = torch.cuda.Stream
    return make(device)


def current_stream(device: torch.device) -> Any:
    """Return the current stream."""
    return torch.cuda.current_stream(device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Within this, this thread's work is queued on a stream."""
    return torch.cuda.stream(stream)


def is_capturing(device: torch.device) -> bool:
    """Tell whether a device's current stream is being captured into a CUDA graph, by anyone."""
    if not is_gpu(device):
        return False
    is_used: Any = torch.cuda.is_initialized
    is_other = is_used() and index(device) != torch.cuda.current_device()
    if is_other:
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    return torch.cuda.is_current_stream_capturing()


def mark(device: torch.device) -> Any:
    """Record an event in the device's queue; None without a queue."""
    if not is_gpu(device):
        return None
    make: Any = torch.cuda.Event
    event = make(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def is_passed(mark: Any) -> bool:
    """Tell whether the device has reached an event; true without one."""
    return mark is None or bool(mark.query())


def wait_for(mark: Any) -> None:
    """Wait until the device has reached an event; does nothing without one."""
    if mark is not None:
        mark.synchronize()


def seconds_between(begin: Any, end: Any) -> float:
    """Return the time between two events, once the second is reached; 0.0 without events."""
    if begin is None or end is None:
        return 0.0
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000.0


# --- its random numbers ----------------------------------------------------------------------


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the random states of PyTorch, the processor's and a GPU's, without waiting."""
    states = [torch.get_rng_state()]
    if is_gpu(device):
        states.append(torch.cuda.get_rng_state(device))
    return states
