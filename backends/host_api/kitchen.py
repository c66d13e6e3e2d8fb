"""The host's own library of kernels, whose operators stay whole in a graph.

Relies on `comfy_kitchen` (`list_backends`), which chooses a backend at each call of an operator.
"""

from __future__ import annotations

import importlib.metadata
import sys

PACKAGE = "comfy_kitchen"


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
