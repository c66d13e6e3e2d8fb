"""Classes with declared fields, such as data classes and named tuples, whose constructors are code
that no file contains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .watch import Watch


def constructors(cls: type, watch: Watch) -> list[Callable[..., Any]]:
    """Return such a class's constructor and the defaults of its fields; nothing for any other
    class.

    Args:
        watch: their names are added, to notice later changes.
    """
    own: Any = cls
    made = [each for each in (own.__new__, own.__init__) if is_generated(each)]
    for function in made:
        watch.add_attribute(cls, function.__name__)
    return made


def is_generated(function: Any) -> bool:
    """Tell whether a function's code was generated from a class's fields."""
    try:
        return bool(function.__code__.co_filename == "<string>")
    except AttributeError:
        return False
