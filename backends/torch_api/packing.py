"""Pack what a call of a generated module needs: Python without kernel sources, and the chosen
binary of each kernel.

Sources: torch/_inductor/runtime/{triton_heuristics,static_triton_launcher}.py of torch 2.10-2.15.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import BuildError
from ..reasons import of
from . import operators
from .lean_source import lean_source


def pack(module: ModuleType, source: str) -> tuple[bytes, int]:
    """Return what a call of a generated module needs, and the bytes of its binaries.

    The module must have been called once, so that each Triton kernel has chosen its configuration.
    """
    lean, kernels = lean_source(source)
    triton: dict[str, tuple[Any, bytes]] = {}
    cpp: dict[str, bytes] = {}
    for name in kernels:
        kernel = getattr(module, name)
        if hasattr(kernel, "launchers"):
            triton[name] = _chosen(name, kernel)
        else:
            cpp[name] = _library_of(kernel).read_bytes()
    binaries = [binary for _, binary in triton.values()] + list(cpp.values())
    parts = {
        "source": lean,
        "operators": operators.schemas(lean),
        "triton": triton,
        "cpp": cpp,
    }
    return pickle.dumps(parts, protocol=4), sum(map(len, binaries))


def _chosen(name: str, kernel: Any) -> tuple[Any, bytes]:
    """A Triton kernel's chosen configuration, and its binary."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    if len(kernel.launchers) != 1:
        raise BuildError(of("not_chosen", name=name, count=len(kernel.launchers)))
    config = kernel.launchers[0].config
    for result in kernel.compile_results:
        if result.config == config and hasattr(result.kernel, "arg_tys"):
            folder = triton_cache_dir(result.compile_meta.get("device", 0))
            path = Path(folder, triton_hash_to_path_key(result.kernel.hash))
            path /= f"{result.kernel.name}.cubin"
            kept = copy.copy(result)
            kept.kernel = copy.copy(result.kernel)
            kept.kernel.__dict__.pop("C_impl", None)
            kept.kernel.cubin_raw = None
            return kept, path.read_bytes()
    raise BuildError(of("needs_triton", name=name))


def _library_of(kernel: Any) -> Path:
    """The shared library behind a C++ kernel's binding."""
    owner = getattr(kernel, "__self__", None)
    path = getattr(owner, "__file__", None)
    if path is None:
        raise BuildError(of("no_library", name=repr(kernel)))
    return Path(path)
