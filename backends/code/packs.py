"""Whose code something is: the host's, or which pack's in the host's folders of custom nodes."""

from __future__ import annotations

import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..reasons import Reason, of

#: The name of our own package in this process.
OWN = __name__.rsplit(".", 2)[0]
#: Packages whose code is no pack's.
_HOMES = frozenset(
    (
        *("comfy", "comfy_extras", "comfy_kitchen", "comfy_aimdo"),
        *("torch", "torchvision", "einops"),  # libraries of the host's models
        *("abc", "builtins", "collections", "typing"),
    )
)


class Pack(NamedTuple):
    """One pack: its name for people, its folder (None for a single file) and the module's file."""

    name: str
    folder: Path | None
    file: Path


def is_known(module: str | None) -> bool:
    """Tell whether a module's code is the host's, its models' libraries' or Python's own."""
    return (module or "").partition(".")[0] in _HOMES


def unbound(function: Any) -> Any:
    """Return the function that a method or a partial calls in the end."""
    while isinstance(function, (types.MethodType, partial)):
        function = function.__func__ if isinstance(function, types.MethodType) else function.func
    return function


def origin(function: Any) -> str:
    """Return the name of the module of a function's code, whatever it wraps and is bound to."""
    return str(getattr(unbound(function), "__globals__", {}).get("__name__") or "")


def pack_of(module: str) -> Pack | None:
    """Return the pack that a module (by its name in `sys.modules`) belongs to, or None.

    The host and its own extras, torch, installed packages and this pack do not count as packs.
    """
    if module.startswith(OWN):
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


def pack_of_function(function: Any) -> Pack | None:
    """Return the pack of a function's code, whatever it wraps; None if it has none."""
    return pack_of(origin(function))


def owner_of(part: Any) -> str:
    """Name the owner of a class or function for people: a pack's folder, or else a package."""
    home = getattr(unbound(part), "__module__", None)
    module = origin(part) or str(home or "an unknown module")
    pack = pack_of(module)
    if pack is not None:
        return pack.name
    return re.split(r"[/\\]", module)[-1].partition(".")[0]  # the host names modules by their paths


def foreign_class(cls: type) -> Reason | None:
    """Name the owner of a class that is neither the host's nor torch's."""
    if is_known(cls.__module__):
        return None
    return of("own_class", name=cls.__name__, owner=owner_of(cls))


def is_made_of_the_hosts(cls: type) -> bool:
    """Tell whether a class is the host's or torch's, or derives from one of the host's."""
    return is_known(cls.__module__) or any(
        base.__module__.partition(".")[0] == "comfy" for base in cls.__mro__
    )


def _folder(whole: Path, file: Path) -> Path | None:
    return None if whole == file else whole


def _folders() -> list[Path]:
    paths = sys.modules.get("folder_paths")
    if paths is None:  # a worker, or a process without the host
        return []
    return [Path(folder).absolute() for folder in paths.get_folder_paths("custom_nodes")]
