"""Whose code something is: the host's, or which pack's, as people know it."""

from __future__ import annotations

import inspect
from pathlib import PurePath
from typing import Any

#: Packages whose code is no pack's.
HOMES = frozenset(
    (
        "comfy",
        "torch",
        "comfy_kitchen",
        "comfy_aimdo",
        "abc",
        "builtins",
        "collections",
        "typing",
    )
)
_FOLDER = "custom_nodes"


def is_known(module: str | None) -> bool:
    """Tell whether a module's code is the host's, torch's or Python's own."""
    return (module or "").partition(".")[0] in HOMES


def pack_of(thing: Any) -> str:
    """Return the name of the pack that a class or function is of.

    By the file that it was written in: a wrapper goes by the names of what it wraps. Without one,
    the first part of its module's name.
    """
    if (folder := pack_folder(thing)) is not None:
        return folder
    code = getattr(thing, "__globals__", {})
    return str(code.get("__name__") or getattr(thing, "__module__", "")).partition(".")[0]


def pack_folder(thing: Any) -> str | None:
    """Return the folder of custom nodes whose file a class or function was written in, if any."""
    try:
        parts = PurePath(inspect.getfile(getattr(thing, "__func__", thing))).parts
    except (TypeError, OSError):  # neither class nor function, or without a file
        return None
    if _FOLDER not in parts[:-1]:
        return None
    return parts[parts.index(_FOLDER) + 1].removesuffix(".py")


def foreign_class(cls: type) -> str | None:
    """Say whose a class is, if it is neither the host's nor torch's."""
    if is_known(cls.__module__):
        return None
    return f"{cls.__name__} is another node's own class ({pack_of(cls)})"
