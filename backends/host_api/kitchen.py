"""The host's own library of kernels, whose operators stay whole in a graph.

Relies on `comfy_kitchen` (`list_backends`), which chooses a backend at each call of an operator.
"""

from __future__ import annotations

import importlib.metadata
import sys

PACKAGE = "comfy_kitchen"

#: Formats whose products may be captured in a CUDA graph, by their names in files. Not so int4,
#: whose product times its kernels for each new size (`ops/convrot_w4a4.cu`); others were not tried.
MAY_BE_CAPTURED = frozenset({"float8_e4m3fn", "int8_tensorwise"})
#: Those of them for whose products the library (0.2.22 and newer) takes memory for each stream, and
#: frees it for more at a size that needs more (`ops/cutlass_gemm_int8.cu`). Within a capture that
#: ends the process; after one, the graph would write where something else lies.
TAKES_MEMORY_BY_STREAM = frozenset({"int8_tensorwise"})


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
