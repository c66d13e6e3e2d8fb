"""A norm whose region also does the work of the activation after it, where the host calls the two
separately.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .binding import Forward
from .plan import Dispatch, Follower, Place, RegionCall, dispatch_one

#: On what a region returned in place of a norm: the activation whose work is done.
_DONE = "warmgraph_done"


def norm_and_activation(place: Place, norm: torch.nn.Module, act: torch.nn.Module) -> Dispatch:
    """Let the norm's region do the activation's part.

    The mark is on the tensor itself, so neither other threads nor an exception affect whether an
    activation runs.

    Args:
        place: a region that computes `act(norm(...))`.
    """

    def served(call: RegionCall, x: torch.Tensor) -> torch.Tensor | None:
        result: torch.Tensor | None = call(x)
        if result is not None:
            setattr(result, _DONE, act)
        return result

    def make_act(host: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            for given in (*args, *kwargs.values()):
                if getattr(given, _DONE, None) is act:
                    delattr(given, _DONE)
                    return given
            return host(*args, **kwargs)

        return forward

    dispatch = dispatch_one(place, served)
    return replace(dispatch, module=norm, follower=Follower(act, make_act))
