"""Whether a dictionary has changed, without a look at what is in it.

Source: torch/csrc/dynamo/guards.cpp, whose guards are about the same, of torch 2.10-2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch


def _unknown(_: dict[Any, Any]) -> Any:
    """Say that any dictionary may have changed."""
    return object()


def _found() -> Callable[[dict[Any, Any]], Any]:
    try:
        found: Callable[[dict[Any, Any]], Any] = attrgetter("_dynamo.guards.dict_version")(torch._C)
    except AttributeError:
        return _unknown
    return found


#: Returns what differs once anything in a dictionary was set or deleted; not for what changes
#: within its values.
version_of = _found()
