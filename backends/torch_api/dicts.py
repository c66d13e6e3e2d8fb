"""Whether anything in a dictionary was set or deleted, without a look at what is in it.

Source: torch/csrc/dynamo/guards.cpp of torch 2.10-2.15, whose guards ask the same.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch


def _found() -> Callable[[dict[Any, Any]], Any]:
    try:
        found: Callable[[dict[Any, Any]], Any] = attrgetter("_dynamo.guards.dict_version")(torch._C)
    except AttributeError:
        return lambda _: object()  # any may have changed
    return found


#: Returns what differs once that is so; not once something within a value is.
version_of = _found()
