"""The host's own library of kernels, whose operators stay whole in a graph.

Relies on `comfy_kitchen` (`list_backends`), which chooses a backend at each call of an operator.
"""

from __future__ import annotations

import importlib.metadata
import sys

PACKAGE = "comfy_kitchen"

#: Formats whose products may be captured in a CUDA graph, by their names in files. Not so those of
#: int8 and int4: the library (0.2.22 and newer) takes memory for each stream and size that is new
#: to it (`ops/cutlass_gemm_int8.cu`), which within a capture ends the process, and frees it once
#: more is needed, while a graph may still write there. Others were not tried.
MAY_BE_CAPTURED = frozenset({"float8_e4m3fn"})


def facts() -> str:
    """Return its version and the backends that it may choose from: what its operators compute."""
    library = sys.modules.get(PACKAGE)
    if library is None:
        return "not there"
    backends = library.list_backends()
    enabled = sorted(n for n, b in backends.items() if b.get("available") and not b.get("disabled"))
    return f"{_version()}: {', '.join(enabled)}"


def _version() -> str:
    try:
        return importlib.metadata.version(PACKAGE.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
