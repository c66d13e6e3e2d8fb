"""Memory pools for graphs under `cudaMallocAsync` that no other card maps.

A graph's memory is mapped by the cards that map its card's pool at that moment, and PyTorch has a
card's pool mapped by each card that memory is copied to. Once some of such memory was freed, the
driver overlaps live allocations in later captures: seen with driver 580.159 on two H200, with
PyTorch alone, and never if no other card maps it or nothing is freed. So a card's pool is exchanged
while a graph is captured on it. No other thread allocates on the card meanwhile (`capture_gate`),
or no other card could map that either. Captures of others are not changed.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#peer-access-with-stream-capture
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..device import gpu
from ..device.libcuda import library

logger = logging.getLogger(__name__)

_NO_LIBRARY = 3  # CUDA_ERROR_NOT_INITIALIZED
_PINNED = _ON_DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE


class _Properties(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = (
        ("allocation_type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("security_attributes", ctypes.c_void_p),
        ("max_bytes", ctypes.c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    )


class OwnPools:
    """A pool for each card, as long as the process lives; for any thread."""

    def __init__(self, library: Callable[[], Any] = library) -> None:
        """Set up; there are no pools yet.

        Args:
            library: the driver's, or None.
        """
        self._library = library
        self._lock = threading.Lock()
        self._pools: dict[int, ctypes.c_void_p | None] = {}

    def are_apart(self, device: torch.device) -> bool:
        """Whether no other card maps what we capture on a device."""
        return self._of(device) is not None

    def enter(self, device: torch.device) -> ctypes.c_void_p | None:
        """Have a device's allocations come from its own pool.

        Returns:
            The previous pool, for `leave`; None if nothing changed.
        """
        pool = self._of(device)
        if pool is None:
            return None
        before = ctypes.c_void_p()
        known, number = self._library(), gpu.index(device)
        status = known.cuDeviceGetMemPool(ctypes.byref(before), number)
        if status == 0 and before.value == pool.value:  # of another capture on it
            return None
        status = status or known.cuDeviceSetMemPool(number, pool)
        if status == 0:
            return before
        self._pools[number] = None
        _tell_of_none(number, status)
        return None

    def leave(self, device: torch.device, before: ctypes.c_void_p | None) -> None:
        """Restore the previous pool."""
        if before is None:
            return
        number = gpu.index(device)
        if status := self._library().cuDeviceSetMemPool(number, before):
            logger.error(
                "The CUDA driver does not give card %d its memory pool back (error %d): restart "
                "ComfyUI if it fails to copy between cards",
                number,
                status,
            )

    def _of(self, device: torch.device) -> ctypes.c_void_p | None:
        """Return the pool of a device; None if the driver makes none."""
        number = gpu.index(device)
        with self._lock:
            if number not in self._pools:
                self._pools[number] = self._make(number)
            return self._pools[number]

    def _make(self, number: int) -> ctypes.c_void_p | None:
        known, pool = self._library(), ctypes.c_void_p()
        wanted = _Properties(allocation_type=_PINNED, location_type=_ON_DEVICE, location_id=number)
        status = _NO_LIBRARY
        if known is not None:
            status = known.cuMemPoolCreate(ctypes.byref(pool), ctypes.byref(wanted))
        if status == 0:
            return pool
        _tell_of_none(number, status)
        return None


def _tell_of_none(number: int, status: int) -> None:
    logger.warning(
        "The CUDA driver gives no memory pool for card %d (error %d): what is recorded there keeps "
        "its memory until ComfyUI ends",
        number,
        status,
    )


#: Of this process: a card has one pool at a time for all of it.
OWN_POOLS = OwnPools()


class OwnPoolGraph:
    """A CUDA graph that is captured into its card's own pool, with PyTorch's names."""

    def __init__(self, device: torch.device, graph: Any, pools: OwnPools = OWN_POOLS) -> None:
        """Take an empty graph, to be captured on a device."""
        self._device, self._graph, self._pools = device, graph, pools
        self._before: ctypes.c_void_p | None = None

    def capture_begin(self, **how: Any) -> None:
        """Capture what this thread queues on its current stream from now on."""
        self._before = self._pools.enter(self._device)
        try:
            self._graph.capture_begin(**how)
        except BaseException:
            self._pools.leave(self._device, self._before)
            raise

    def capture_end(self) -> None:
        """The capture is complete, or was broken off, which PyTorch raises as a RuntimeError."""
        try:
            self._graph.capture_end()
        finally:
            self._pools.leave(self._device, self._before)

    def replay(self) -> None:
        """Compute."""
        self._graph.replay()

    def reset(self) -> None:
        """Free the graph."""
        self._graph.reset()
