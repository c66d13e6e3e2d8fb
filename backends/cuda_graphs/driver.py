"""The memory of a card that CUDA graphs hold, which PyTorch does not count under every allocator.

Under `cudaMallocAsync` a graph's memory belongs to the driver, which says how much it is.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ..device import gpu
from ..device.libcuda import library
from ..several_cards.own_pools import OWN_POOLS, OwnPoolGraph

_RESERVED_NOW = 2  # CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


def is_driver_allocator() -> bool:
    """Tell whether PyTorch allocates through the driver (`cudaMallocAsync`, the host's default)."""
    return torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def is_mapped() -> bool:
    """Tell whether another card may map what a graph allocates."""
    return is_driver_allocator() and torch.cuda.device_count() > 1


def make_graph(device: torch.device) -> Any:
    """Return a CUDA graph into which nothing is captured yet."""
    graph = torch.cuda.CUDAGraph()
    return OwnPoolGraph(device, graph) if is_mapped() else graph


def record(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """Capture a call on the current card; return its result, and what replays the call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph.replay


def trim(device: torch.device) -> None:
    """Free a device's memory that no graph uses, if our captures there allow it."""
    known = library() if is_driver_allocator() else None
    if known is not None and (not is_mapped() or OWN_POOLS.are_apart(device)):
        known.cuDeviceGraphMemTrim(gpu.index(device))


def reserved_bytes(device: torch.device) -> int:
    """Return a number that grows by what a capture takes."""
    if not is_driver_allocator():
        return torch.cuda.memory_reserved(device)
    driver = library()
    if driver is None:
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    value = ctypes.c_uint64()
    driver.cuDeviceGetGraphMemAttribute(gpu.index(device), _RESERVED_NOW, ctypes.byref(value))
    return value.value


def free_bytes(device: torch.device) -> int:
    """Return the card's free memory; what PyTorch keeps cached counts as taken."""
    return torch.cuda.mem_get_info(device)[0]


def make_stream(device: torch.device) -> Any:
    """Return a stream that nobody else has; PyTorch hands each of its own out to many.

    Raises:
        RuntimeError: the driver's library was not found, or makes none.
    """
    driver = library()
    if driver is None:
        raise RuntimeError("the CUDA driver's library was not found")
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes the device's context this thread's
        status = driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING)
    if status != 0 or stream.value is None:
        raise RuntimeError(f"the CUDA driver gives no stream (error {status})")
    external: Any = torch.cuda.ExternalStream
    return external(stream.value, device=device)
