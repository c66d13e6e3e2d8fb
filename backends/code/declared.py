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
    own: Any = cls
    made = [each for each in (own.__new__, own.__init__) if is_generated(each)]
    for function in made:
        watch.add_attribute(cls, function.__name__)
    return made


def is_generated(function: Any) -> bool:
    """Tell whether a function's code was made of a class's fields."""
    try:
        return bool(function.__code__.co_filename == "<string>")
    except AttributeError:
        return False
