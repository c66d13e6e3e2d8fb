"""Frontends of the host beside the one that it pins, each unpacked in a folder of its own in the
user's cache: no virtual environment gets another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import Distribution
from pathlib import Path

PACKAGE = "comfyui-frontend-package"
#: Instead of a version, the package index's newest; asked anew each time.
NEWEST = "newest"


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "warmgraph" / "frontends"


def frontend_root(version: str) -> Path:
    """Return the folder that `--front-end-root` takes, after a download where there is none.

    Args:
        version: such as 1.47.12, or `NEWEST`.

    Raises:
        RuntimeError: pip did not get it; the text ends with what pip said.
    """
    kept = _cache()
    if version == NEWEST or not (kept / version).is_dir():
        version = _install(version, kept)
    return kept / version / "comfyui_frontend_package" / "static"


def _install(version: str, kept: Path) -> str:
    """Unpack one into the cache, unless it is there; return its version."""
    kept.mkdir(parents=True, exist_ok=True)
    wanted = PACKAGE if version == NEWEST else f"{PACKAGE}=={version}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(dir=kept, prefix=".part-") as part:
        options = ["--no-deps", "--no-compile", "--quiet", "--target", f"{part}/package"]
        done = subprocess.run(
            [*pip, "install", *options, wanted], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"pip did not get {wanted}: {done.stderr.strip()[-500:]}")
        (info,) = Path(part, "package").glob("comfyui_frontend_package-*.dist-info")
        found = Distribution.at(info).version
        if not (kept / found).is_dir():
            Path(part, "package").rename(kept / found)
    return found
