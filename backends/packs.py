"""Whose code something is: which pack in the host's folders of custom nodes a module belongs to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from .sources import is_foreign, origin

_OWN = __name__.rpartition(".")[0]
_HOSTS = ("comfy", "comfy_extras", "comfy_kitchen", "comfy_aimdo", "torch", "builtins", "__main__")


class Pack(NamedTuple):
    """One pack: its name for people, its folder (None for a single file) and the module's file."""

    name: str
    folder: Path | None
    file: Path


def pack_of(module: str) -> Pack | None:
    """Return the pack that a module (by its name in `sys.modules`) belongs to, None if to none.

    The host and its own extras, torch, installed packages and this pack are none.
    """
    if module.startswith(_OWN):
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str):
        return None
    path = Path(file).absolute()
    for folder in _folders():
        if folder in path.parents:
            first = path.relative_to(folder).parts[0]
            whole = folder / first
            return Pack(whole.stem if whole == path else first, _folder(whole, path), path)
    return None


def owner_of(part: Any) -> str:
    """Name whose a class or function is, for people: a pack's folder, or else a package."""
    module = origin(part) or str(getattr(part, "__module__", None) or "an unknown module")
    pack = pack_of(module)
    return module.partition(".")[0] if pack is None else pack.name


def pack_of_function(function: Any) -> Pack | None:
    """Return the pack whose code a function is, whatever it wraps; None where it is none's."""
    return pack_of(origin(function)) if is_foreign(function) else None


def is_hosts_class(cls: type) -> bool:
    """Tell whether a class is the host's or torch's, or derives from one of the host's."""
    homes = [str(base.__module__).partition(".")[0] for base in cls.__mro__]
    return homes[0] in _HOSTS or "comfy" in homes


def _folder(whole: Path, file: Path) -> Path | None:
    return None if whole == file else whole


def _folders() -> list[Path]:
    paths = sys.modules.get("folder_paths")
    if paths is None:  # a worker, or a process without the host
        return []
    return [Path(folder).absolute() for folder in paths.get_folder_paths("custom_nodes")]
