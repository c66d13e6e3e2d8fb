"""CUDA source compiled when it is first needed, by the compiler that PyTorch brings (NVRTC): no
toolkit, no headers, no files.

PyTorch's own `torch.cuda._compile_kernel` wants the headers of a CUDA toolkit, which few people who
run models have; what it loads the compiler and the code with does not.
Source: torch/cuda/_utils.py of torch 2.10-2.15; https://docs.nvidia.com/cuda/nvrtc
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: `launch(blocks, threads, arguments)`: threads of each block; tensors, integers as C's int and
#: numbers as its double.
Launch = Callable[[int, int, Sequence[Any]], None]


def compile_cuda(source: str, name: str) -> Launch:
    """Compile a kernel for the current device and return what launches it on the current stream.

    Args:
        source: CUDA C++ that includes nothing; the kernel is `extern "C"`.

    Raises:
        RuntimeError: this PyTorch has no such compiler, or it refuses the source.
    """
    major, minor = torch.cuda.get_device_capability()
    binary = compile_binary(source, name, f"sm_{major}{minor}")
    try:
        from torch.cuda import _utils

        tools: Any = _utils
        kernel = tools._cuda_load_module(binary, [name])[name]
    except (AttributeError, ImportError, KeyError, OSError, TypeError) as error:
        raise RuntimeError(f"torch {torch.__version__} loads no such code: {error}") from error

    def launch(blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        kernel(grid=(blocks, 1, 1), block=(threads, 1, 1), args=list(arguments))

    return launch


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
        from torch.cuda import _utils

        tools: Any = _utils
        return tools._get_nvrtc_library()
    except (AttributeError, ImportError, OSError, ValueError) as error:
        raise RuntimeError(f"torch {torch.__version__} brings no NVRTC: {error}") from error
