"""Import modules and packages of this pack by their path.

Its root stays off `sys.path`, where its `nodes` would hide the host's. A process that has none of
the pack's packages yet has this folder there for the import of this module.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]

#: First lines of a process that has `warmgraph_backends`, and nothing else of the pack or of torch.
ADOPT = f"""
import sys
sys.path.insert(0, {str(ROOT / "backends" / "worker")!r})
from main import adopt_package
adopt_package()
"""


#: Packages of ours by name, which are imported as `warmgraph_NAME`.
_OURS = {
    "backends": ROOT / "backends",
    "console": ROOT / "console",
    "tools": ROOT / "dev" / "tools",
}


def load(name: str, path: str | os.PathLike[str]) -> ModuleType:
    """Import a file, or a package by its folder, under a name; whatever had that name loses it."""
    path = Path(path)
    inside = [str(path)] if path.is_dir() else None
    file = path / "__init__.py" if inside else path
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=inside)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is nothing to import in {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_ours(*names: str) -> None:
    """Import packages of ours."""
    for name in names:
        load(f"warmgraph_{name}", _OURS[name])
