"""One call of the UNet as data: how it is made, and its arguments as they were before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..caching.places import EvaluationCall
from ..device.gpu import random_states
from ..host_api.patcher import call_within
from ..host_api.unets import ARGUMENTS


class UNetStep(NamedTuple):
    """One call of the UNet as it is to be made.

    Attributes:
        call: makes it.
        split: takes the output, and the feature if any, from what `call` returned.
        before: its arguments, as they were.
        place, structure: of a whole call whose feature is to be kept.
        random: the state of the random numbers, if its structure was not checked yet.
        ended: called once it is made.
    """

    call: Callable[[], Any]
    split: Callable[[Any], Any]
    before: Before
    place: EvaluationCall | None = None
    structure: str = ""
    random: bytes | None = None
    ended: Callable[[], None] = lambda: None


def alone(output: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Split the result of a call without a feature."""
    return output, None


def within(
    executor: Any, owner: Any, run: Callable[..., Any], call: dict[str, Any]
) -> Callable[[], Any]:
    """Return what calls a function in place of the UNet's own forward, within the remaining
    wrappers.

    Args:
        owner: of the function, as those wrappers see it: a copy, or the UNet.
    """
    inner = call_within(executor, owner, run)
    rest = {name: value for name, value in call.items() if name not in ARGUMENTS}
    return functools.partial(inner, *(call[name] for name in ARGUMENTS), **rest)


class Before(NamedTuple):
    """The arguments of a call, and what was in those containers that the host uses up."""

    call: dict[str, Any]
    copies: dict[str, Any]

    @classmethod
    def of(cls, call: dict[str, Any]) -> Before:
        """Remember a call's arguments as they are now."""
        control = call["control"]
        copied = {
            **call,
            "transformer_options": dict(call["transformer_options"]),
            "control": control and {side: list(given) for side, given in control.items()},
        }
        return cls(call, copied)

    def restore(self) -> None:
        """Fill the containers again, to make the call once more."""
        options = self.call["transformer_options"]
        options.clear()
        options.update(self.copies["transformer_options"])
        for side, given in (self.copies["control"] or {}).items():
            self.call["control"][side] = given


def random_state(device: torch.device) -> bytes:
    """Return the state of PyTorch's random numbers, without waiting for the GPU."""
    return b"".join(state.numpy().tobytes() for state in random_states(device))
