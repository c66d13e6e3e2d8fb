"""What blocks of the host's diffusion transformers share: their sizes, their attention, and what
another node may put into them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..host_api.options import PATCHES, UNREAD
from ..kernels import host_attention
from ..kinds import live_arguments
from .plan import Call, Form, Forward, Place, Plan, dispatch_one, unknown_layer

#: What a form's reference calls the host's block with.
options = host_attention.options

#: Why a block is the host's where some tokens are modulated otherwise than the others.
REFERENCES = "called with reference images that have a timestep of their own"
#: Why where it takes one timestep alone.
FRAMES = "called with a timestep for each frame"
#: Why where some tokens are hidden, or none has a place.
MASKED = "called with an attention mask"
NOT_ROTATED = "called without a rotation table"

#: Tokens of an image or a video, of a text, and of both together.
SYMBOLS = {
    s.name: s
    for s in (
        Symbol("batch", 1, 64, 2),
        Symbol("img", 1, 2**17, 4104),
        Symbol("txt", 1, 2**14, 264),
        Symbol("tokens", 1, 2**17, 4368),
    )
}

#: Options that these models' own forwards do not read.
UNREAD_OPTIONS = UNREAD | {"cond_or_uncond", "sample_sigmas", "sigmas"}


def mask(name: str) -> Any:
    """Return what a form's reference calls the host's block with in a mask's place (`serve`)."""
    return live_arguments.given(name, live_arguments.LiveMask)


def attention(name: str) -> Any:
    """Return the same in the place of a function that attends."""
    return live_arguments.given(name, host_attention.LiveAttention)


class Attending(Form):
    """A block that `reference` calls with `options()`, for all attention within."""

    live_attention = True


class LastLayer(Form):
    """`x [batch, img, C]`, what modulates `vec [batch, C]` -> x, or what its tokens unfold into."""

    name = "last"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return modulated("vec", module.linear.in_features, dtype)


def modulated(vector: str, width: int, dtype: str) -> tuple[InputSpec, ...]:
    """Return the inputs of a block of one stream: `x [batch, img, C]`, a vector `[batch, C]`."""
    return (
        InputSpec("x", dtype, ("batch", "img", width)),
        InputSpec(vector, dtype, ("batch", width)),
    )


def cut_stack(
    plan: Plan,
    model: Any,
    stack: str,
    cls: type[torch.nn.Module],
    form: Form,
    make: Callable[[Call, Forward], Forward],
) -> None:
    """Make each block of a stack one region; one of another class than this stays outside.

    Args:
        stack: where in the model.
    """
    for i, block in enumerate(attrgetter(stack)(model)):
        name = f"{stack}.{i}"
        if type(block) is cls:
            plan.dispatches.append(dispatch_one(Place(name, block, form), make))
        else:
            plan.outside.append((name, unknown_layer(block)))


def cut_last(plan: Plan, model: Any, name: str, cls: type[torch.nn.Module], form: Form) -> None:
    """Make a last layer of this very class one region; ControlNets have none."""
    last = getattr(model, name, None)
    if type(last) is cls:
        plan.dispatches.append(dispatch_one(Place(name, last, form), last_layer))


def calls_of(*classes: str) -> Callable[[torch.nn.Module], bool]:
    """Make a `Family.may_be_captured` that knows these classes by name: their own forward neither
    reads from the GPU nor copies to it (`tests/engine/test_device_copies.py`).
    """
    return lambda root: type(root).__name__ in classes


#: Patches that act inside a block.
_WITHIN = ("attn1_patch", "attn1_output_patch", "attn2_patch", "mlp_patch")


def changed(options: dict[str, Any]) -> str | None:
    """Return why a block must run the host's code in this call, or None.

    Args:
        options: the call's `transformer_options`.
    """
    patches = options.get(PATCHES) if options else None
    if patches:
        for name in _WITHIN:
            if name in patches:
                return f"another node patches {name}"
    return None


def serve(
    call: Call,
    reason: str | None,
    options: dict[str, Any],
    *inputs: Any,
    live: Mapping[str, Any] | None = None,
) -> Any:
    """Compute a block, its attention with the call's `transformer_options`; None where the host
    must, for a `reason`.

    Args:
        live: masks of this call, and functions that attend, by the names that the form's reference
            has for them.
    """
    if reason is not None:
        return call.decline(reason)
    with host_attention.attending_with(options, live):
        return call(*inputs)


def split(joint: torch.Tensor, axis: int, *lengths: int) -> list[torch.Tensor]:
    """Cut a tensor along its tokens: pieces of these lengths, and what is left."""
    pieces = []
    for length in lengths:
        pieces.append(joint.narrow(axis, 0, length))
        joint = joint.narrow(axis, length, joint.shape[axis] - length)
    return [*pieces, joint]


def last_layer(call: Call, host: Forward) -> Forward:
    """Make the forward of a last layer, which takes the tokens and what modulates them."""

    def forward(
        x: torch.Tensor,
        vec: torch.Tensor,
        /,
        modulation_dims: Any = None,
        timestep_zero_index: Any = None,
    ) -> torch.Tensor:
        result: torch.Tensor | None
        if modulation_dims is None and timestep_zero_index is None:
            result = call(x, vec)
        else:
            result = call.decline(REFERENCES)
        return host() if result is None else result

    return forward
