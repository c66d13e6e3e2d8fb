"""Compile CUDA source on demand by PyTorch's NVRTC: no toolkit, headers or files.

`torch.cuda._compile_kernel` needs a toolkit's headers, which few users have; what it loads the
compiler and code with does not. Source: torch/cuda/_utils.py of torch 2.10-2.15;
https://docs.nvidia.com/cuda/nvrtc
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..reasons import of
from .cuda_queue import current_stream

logger = logging.getLogger(__name__)

_DOUBLE = struct.Struct("<d")
#: `launch(blocks, threads, arguments)`: threads of each block; tensors, integers as C's int or long
#: long and numbers as its double.
Launch = Callable[[int, int, Sequence[Any]], None]


def compile_or_warn(source: str, name: str, what: str, device: torch.device) -> Launch | None:
    """As `compile_cuda`; log a failure and return None.

    Args:
        what: is slower without, in words.
    """
    try:
        return compile_cuda(source, name, device)
    except RuntimeError as error:
        logger.warning("%s", of("slower_kernel", what=what, error=error))
        return None


def compile_cuda(source: str, name: str, device: torch.device) -> Launch:
    """Compile a kernel for a GPU; return its launcher, on the stream current at the launch.

    Args:
        source: CUDA C++ without includes; the kernel is `extern "C"`.

    Raises:
        RuntimeError: this PyTorch has no such compiler, or it refuses the source.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    major, minor = torch.cuda.get_device_capability(index)
    binary = compile_binary(source, name, f"sm_{major}{minor}")
    try:
        tools = _tools()
        with torch.cuda.device(index):
            kernel = tools._cuda_load_module(binary, [name])[name]
        start = tools._get_gpu_runtime_library().cuLaunchKernel
        if kernel.func is None:
            raise AttributeError(f"{name} has no address")
    except (AttributeError, KeyError, OSError, TypeError) as error:
        raise RuntimeError(f"torch {torch.__version__} loads no such code: {error}") from error

    address, slots_of = kernel.func, _Slots()

    def launch(blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        # Torch's own call of a kernel takes the processor several times as long.
        slots, places = slots_of.thread(len(arguments))
        for n, argument in enumerate(arguments):
            slots[n] = _as_slot(argument)
        stream = ctypes.c_void_p(current_stream(index))
        with _on(index):
            status = start(address, blocks, 1, 1, threads, 1, 1, 0, stream, places, None)
        if status:
            raise RuntimeError(f"CUDA answered {status} to a launch of {name}")

    return launch


class _Slots(threading.local):
    """A thread's kernel arguments, eight bytes each; a launch copies what the kernel declares."""

    def __init__(self) -> None:
        self._kept: tuple[Any, Any] | None = None

    def thread(self, count: int) -> tuple[Any, Any]:
        """Return this thread's slots, and their addresses."""
        if self._kept is None or len(self._kept[0]) != count:
            slots = (ctypes.c_uint64 * count)()
            first = ctypes.addressof(slots)
            places = (ctypes.c_void_p * count)(*(first + 8 * n for n in range(count)))
            self._kept = slots, places
        return self._kept


def _on(index: int) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current one, if it is not."""
    if torch.cuda.current_device() == index:
        return contextlib.nullcontext()
    return torch.cuda.device(index)


def _as_slot(value: Any) -> int:
    """The bytes of an argument, little-endian."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return int.from_bytes(_DOUBLE.pack(value), "little")
    return int(value)


def compile_binary(source: str, name: str, architecture: str) -> bytes:
    """Compile for an architecture such as "sm_90"; needs no GPU.

    Raises:
        RuntimeError: as `compile_cuda`.
    """
    compiler = _compiler()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"NVRTC answered {status} for {name}")

    text, file = source.encode(), f"{name}.cu".encode()
    check(compiler.nvrtcCreateProgram(ctypes.byref(program), text, file, 0, None, None))
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if compiler.nvrtcCompileProgram(program, 1, options):
            compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{name} for {architecture}: {log.value.decode()[:1000]}")
        check(compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        check(compiler.nvrtcGetCUBIN(program, binary))
        return binary.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _compiler() -> Any:
    try:
        return _tools()._get_nvrtc_library()
    except (AttributeError, OSError, ValueError) as error:
        raise RuntimeError(f"torch {torch.__version__} brings no NVRTC: {error}") from error


def _tools() -> Any:
    try:
        from torch.cuda import _utils
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} compiles no CUDA source") from error
    return _utils
