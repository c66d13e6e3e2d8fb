"""What the host's diffusion transformer blocks share: sizes, attention, others' patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ..contract import InputSpec
from ..host_api.options import PATCHES, UNREAD
from ..operators import host_attention, live_arguments
from ..plans.binding import OR_NONE, Arguments, Forward, Use
from ..plans.plan import Form, Place, Plan, RegionCall, dispatch_one, unknown_layer
from ..plans.symbols import SYMBOLS as SYMBOLS
from ..reasons import Reason, of

#: A step's `transformer_options`.
Options = dict[str, Any] | None

#: What a form's reference calls the host's block with.
options = host_attention.options

#: Some tokens are modulated differently.
REFERENCES = of("references")
#: Why where it takes one timestep alone.
FRAMES = of("frames")
#: Why where some tokens are hidden, or none has a place.
MASKED = of("masked")
NOT_ROTATED = of("not_rotated")

#: Options that these models' own forwards do not read.
UNREAD_OPTIONS = UNREAD | {"cond_or_uncond", "sample_sigmas", "sigmas"}


def mask(name: str) -> Any:
    """Return the placeholder for a mask in a reference's call of the host's block (`serve`)."""
    return live_arguments.given(name, live_arguments.LiveMask)


def attention(name: str) -> Any:
    """Return the placeholder for an attention function."""
    return live_arguments.given(name, host_attention.LiveAttention)


def takes(*first: str, **uses: Use) -> Arguments:
    """Map a block's arguments; the step's options come first."""
    return Arguments(*first, **uses, transformer_options=OR_NONE)


class Attending(Form):
    """A block that `reference` calls with `options()`; its call's arguments begin with those."""

    live_attention = True

    def serving(self, call: RegionCall, module: Any) -> Forward:
        return partial(self.serve, call)

    def changed(self, options: Options) -> Reason | None:
        """Return why a block must run the host's code in a call with these options, or None."""
        return changed(options)

    def serve(self, call: RegionCall, options: Options, *inputs: Any) -> Any:
        """Compute a place of what is taken of a call; None where the host must."""
        if (reason := self.changed(options)) is not None:
            return call.decline(reason)
        return call(*inputs, options={} if options is None else options)


class LastLayer(Form):
    """`x [batch, img, C]`, modulation `vec [batch, C']` -> x, or what its tokens unfold into."""

    name = "last"
    arguments = Arguments("x", "vec", modulation_dims=REFERENCES, timestep_zero_index=REFERENCES)

    def __init__(
        self,
        family: str,
        title: str,
        *,
        tokens: str = "img",
        vec: tuple[str | int, ...] = ("batch",),
    ) -> None:
        """Set up for one family.

        Args:
            tokens: the symbol that counts tokens.
            vec: the sizes of `vec` except the last.
        """
        self.family = family
        self._title, self._tokens, self._vec = title, tokens, vec

    def label(self, module: Any) -> str:
        return f"{self._title} last layer {module.linear.in_features}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        modulation: Any = getattr(module, "adaLN_modulation", None)
        width = module.linear.in_features
        given = width if modulation is None else modulation[-1].in_features
        return (
            InputSpec("x", dtype, ("batch", self._tokens, width)),
            InputSpec("vec", dtype, (*self._vec, given)),
        )


def modulated(vector: str, width: int, dtype: str) -> tuple[InputSpec, ...]:
    """Return a one-stream block's inputs: `x [batch, img, C]`, a vector `[batch, C]`."""
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
    *,
    widens: bool = False,
    serve: Forward | None = None,
) -> None:
    """Make each block of a stack a region, except those of another class.

    Args:
        stack: its attribute in the model.
        serve: as for `dispatch_one`.
    """
    for i, block in enumerate(attrgetter(stack)(model)):
        name = f"{stack}.{i}"
        if type(block) is cls:
            plan.dispatches.append(dispatch_one(Place(name, block, form, widens), serve))
        else:
            plan.outside.append((name, unknown_layer(block)))


def cut_last(plan: Plan, model: Any, name: str, cls: type[torch.nn.Module], form: Form) -> None:
    """Make a last layer of exactly this class a region; ControlNets have none."""
    last = getattr(model, name, None)
    if type(last) is cls:
        plan.dispatches.append(dispatch_one(Place(name, last, form)))


def calls_of(*classes: str) -> Callable[[torch.nn.Module], bool]:
    """Make a `Family.may_be_captured` for these classes: their forward neither reads from the GPU
    nor copies to it (`tests/engine/test_device_copies.py`).
    """
    return lambda root: type(root).__name__ in classes


#: Patches that act inside a block.
_WITHIN = ("attn1_patch", "attn1_output_patch", "attn2_patch", "mlp_patch")


def changed(options: Options) -> Reason | None:
    """Return why `transformer_options` send a block to the host's code, or None."""
    patches = options.get(PATCHES) if options else None
    if patches:
        for name in _WITHIN:
            if name in patches:
                return of("patches", name=name)
    return None


def serve(
    call: RegionCall,
    reason: Reason | None,
    options: Options,
    *inputs: Any,
    live: Mapping[str, Any] | None = None,
) -> Any:
    """Compute a block with the call's options; None if the host must, for `reason`.

    Args:
        live: the call's masks and attention functions, by their names in the reference.
    """
    if reason is not None:
        return call.decline(reason)
    return call(*inputs, options={} if options is None else options, live=live or {})


def split(joint: torch.Tensor, axis: int, *lengths: int) -> list[torch.Tensor]:
    """Split along tokens into pieces of these lengths and the rest."""
    pieces = []
    for length in lengths:
        pieces.append(joint.narrow(axis, 0, length))
        joint = joint.narrow(axis, length, joint.shape[axis] - length)
    return [*pieces, joint]
