"""Whether an embedded Python, as in ComfyUI's portable version for Windows, has what a C compiler
needs.

Relies on https://docs.python.org/3/using/windows.html#the-embeddable-package, which has neither
headers nor import libraries, and on what triton-windows looks for beside `python.exe`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .line import Line

#: Where the people who make triton-windows keep both folders for each version of Python.
ARCHIVES = "https://github.com/woct0rdho/triton-windows/releases/tag/v3.0.0-windows.post1"

_SETTINGS = re.compile(r"python3\d+\._pth", re.IGNORECASE)  # which only embedded ones have


def headers(folder: Path, version: str) -> Iterator[Line]:
    """Look for `Include` and `libs` beside an embedded Python; nothing for any other.

    Args:
        folder: where its `python.exe` is.
        version: Python's own, as 3.12.7.
    """
    if not any(map(_SETTINGS.fullmatch, _names(folder))):
        return
    library = f"python{''.join(version.split('.')[:2])}.lib"
    lacking = [
        name
        for name, file in (("Include", "python.h"), ("libs", library))
        if not _holds(folder, name.lower(), file)
    ]
    if not lacking:
        yield Line("Python's headers", True, f"Include and libs are in {folder}")
        return
    short = version.rpartition(".")[0]
    what = " and ".join(lacking)
    yield Line(
        "Python's headers",
        False,
        f"{folder} has no {what} (this is an embedded Python), so Triton can compile nothing; "
        f"copy the folders include and libs of an installed Python {short} there, or of "
        f"python_{short}..._include_libs.zip from {ARCHIVES}, and restart ComfyUI",
    )


def _names(folder: Path) -> dict[str, Path]:
    """A folder's entries by lower-case name; none if it cannot be read."""
    try:
        return {path.name.lower(): path for path in folder.iterdir()}
    except OSError:
        return {}


def _holds(folder: Path, name: str, file: str) -> bool:
    """Whether a folder in `folder` holds a file; Windows does not tell capital letters apart."""
    inside = _names(folder).get(name)
    return inside is not None and file in _names(inside)
