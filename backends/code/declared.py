"""Classes whose fields are declared, as data classes and named tuples: what makes their objects is
code that no file has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .watch import Watch


def constructors(cls: type, watch: Watch) -> list[Callable[..., Any]]:
    """Return what makes an object of such a class, with what its fields are where nothing is given;
    nothing of any other.

    Args:
        watch: gets their names, to notice later changes.
    """
    found: list[Callable[..., Any]] = []
    for name in ("__new__", "__init__"):
        function = getattr(cls, name)
        if is_generated(function):
            found.append(function)
            watch.add_attribute(cls, name)
    return found


def is_generated(function: Any) -> bool:
    """Tell whether a function's code was made of a class's fields."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == "<string>"
