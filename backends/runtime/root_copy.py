"""Another way to run a root module: a copy of it made of the same blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .scope import Scope


@dataclass(eq=False)
class RootCopy:
    """Stands for a copy where the host names the object whose function it calls.

    Attributes:
        of: the root module that it was made from.
        module: the copy; `call` runs it.
        call: the function that is called in place of the root module's own forward.
        scopes: what compiles it, by session; freed with the copy.
    """

    of: torch.nn.Module
    module: torch.nn.Module
    call: Callable[..., Any]
    scopes: dict[str, Scope] = field(default_factory=dict)
