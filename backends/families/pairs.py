"""A norm whose region does the work of the activation after it, too, where the host calls each by
itself, one with what the other returned.
"""

from __future__ import annotations

from typing import Any

import torch

from .plan import Call, Dispatch, Follower, Forward, Place

#: On what a region returned in place of a norm: the activation whose work is done.
_DONE = "warmgraph_done"


def norm_and_activation(place: Place, norm: torch.nn.Module, act: torch.nn.Module) -> Dispatch:
    """Let the norm's region do the activation's part.

    The mark is on the tensor itself, so what other threads do or an exception leaves behind has no
    say in whether an activation runs.

    Args:
        place: a region that gives what `act` gives of what `norm` gives.
    """

    def make_norm(call: Call, host: Forward) -> Forward:
        def forward(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor | None = call(x)
            if result is None:
                return host()
            setattr(result, _DONE, act)
            return result

        return forward

    def make_act(host: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            for given in (*args, *kwargs.values()):
                if getattr(given, _DONE, None) is act:
                    delattr(given, _DONE)
                    done: torch.Tensor = given
                    return done
            return host(*args, **kwargs)

        return forward

    return Dispatch(
        norm,
        (place,),
        lambda calls, host: make_norm(calls[0], host),
        Follower(act, make_act),
    )
