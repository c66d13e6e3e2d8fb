"""NVIDIA's driver library, for what PyTorch does not offer, and for use without PyTorch.

https://docs.nvidia.com/cuda/cuda-driver-api
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def library() -> Any:
    """Return the driver's library, or None; a missing one is looked for again, because a process
    may start while its card is hidden.
    """
    try:
        return _load()
    except OSError as error:
        logger.debug("The CUDA driver's library was not found: %s", error)
        return None


@functools.cache
def _load() -> Any:
    if sys.platform == "win32":
        return ctypes.WinDLL("nvcuda.dll")
    return ctypes.CDLL("libcuda.so.1")


def capability() -> str | None:
    """Ask the driver for the first GPU's compute capability; no context is made on it.

    Returns:
        For example "9.0"; None if no GPU is found, whatever PyTorch finds.
    """
    driver = library()
    device, parts = ctypes.c_int(), []
    try:
        if driver is None or driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            return None
        for attribute in _CAPABILITY:
            value = ctypes.c_int()
            if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                return None
            parts.append(str(value.value))
    except AttributeError:  # none that knows these
        return None
    return ".".join(parts)
