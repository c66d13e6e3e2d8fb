"""Regions of the host's Wan Animate 2, whose blocks have a method each for the driving video, the
generated video and the kept keys of the former.

Self-attention, which goes frame by frame there, stays the host's; what precedes and follows it are
regions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..plans.binding import TAKEN, Arguments
from ..plans.plan import (
    Dispatch,
    Form,
    Method,
    Passage,
    Place,
    Plan,
    RegionCall,
    shallow_copy,
    unknown_layer,
)
from . import dit
from .wan_blocks import NAME, NO_IMAGE, context_input, cut_heads, of_all_frames, table_input

#: Arguments of the host's attention that are known here.
_ATTENTION = {
    "qkv": ("self", "x", "freqs"),
    "forward_pose": ("self", "x", "freqs", "transformer_options"),
    "forward_gen": (
        *("self", "x", "freqs", "k_pose", "v_pose", "f_gen", "hw", "buffers"),
        *("ref_strength", "transformer_options"),
    ),
}


class _All(Passage):
    """Replaces a block's attention where keys and values are asked for; also gives queries."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def kv(self, x: torch.Tensor, freqs: torch.Tensor) -> Any:
        return self.attention.qkv(x, freqs)


class _Attended(Passage):
    """Replaces a block's attention by its known result."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result = result

    def forward_pose(self, x: Any, freqs: Any, transformer_options: Any) -> Any:
        return self.result, None, None


class Queries(Form):
    """Self-attention inputs of a WanAnimate2Block: `x [batch, img, C]`, modulation `e [batch, 6,
    C]`, rotation table -> queries, keys, values `[batch, img, heads, D]`.
    """

    family = NAME
    name = "animate2_queries"
    children: tuple[str, ...] | None = ("norm1", "self_attn")

    def label(self, module: Any) -> str:
        return f"Wan Animate 2 queries {module.dim}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("x", dtype, ("batch", "img", module.dim)),
            InputSpec("e", dtype, ("batch", 6, module.dim)),
            table_input(module, ("img",)),
        )

    def code(self) -> tuple[Callable[..., Any], ...]:
        block, attention = _host()
        return block.kv_from_input, block._modulation, attention.qkv

    def reference(self, module: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        cut = shallow_copy(module, self_attn=_All(module.self_attn))
        return tuple(type(module).kv_from_input(cut, *inputs))


class Keys(Queries):
    """As `Queries`, for kept tokens of the driving video: keys and values alone."""

    name = "animate2_keys"

    def label(self, module: Any) -> str:
        return f"Wan Animate 2 keys {module.dim}"

    def code(self) -> tuple[Callable[..., Any], ...]:
        block, attention = _host()
        return block.kv_from_input, block._modulation, attention.kv

    def reference(self, module: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(type(module).kv_from_input(module, *inputs))


class Rest(dit.Attending):
    """A WanAnimate2Block after its self-attention gave `y [batch, img, C]` -> as x."""

    family = NAME
    name = "animate2_rest"
    children = ("norm1", "norm3", "cross_attn", "norm2", "ffn")
    parts = ("cross_attn", "ffn")

    def label(self, module: Any) -> str:
        return f"Wan Animate 2 block {module.dim}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("x", dtype, ("batch", "img", module.dim)),
            InputSpec("y", dtype, ("batch", "img", module.dim)),
            InputSpec("e", dtype, ("batch", 6, module.dim)),
            context_input("context", "txt", module, dtype),
            context_input("context_img", "clip", module, dtype),
        )

    def handed_on(self, module: Any) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(("context", "context_img"), ("cross_attn",))

    def code(self) -> tuple[Callable[..., Any], ...]:
        block, _ = _host()
        return block.forward_pose, block._modulation, block._cross_attn_ffn

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, y, e, text, image = inputs
        cut = shallow_copy(module, self_attn=_Attended(y))
        context = torch.cat((image, text), 1)
        result: torch.Tensor = type(module).forward_pose(
            cut, x, e, None, context, image.shape[1], transformer_options=dit.options()
        )[0]
        return result


QUERIES, KEYS, REST = Queries(), Keys(), Rest()
FORMS: dict[str, Form] = {form.name: form for form in (QUERIES, KEYS, REST)}


def plan_animate2(symbols: dict[str, Symbol], model: Any) -> Plan:
    plan = Plan(symbols=symbols)
    block_class, attention = _host()
    for name, known in _ATTENTION.items():
        found = tuple(inspect.signature(getattr(attention, name)).parameters)
        if found != known:
            raise TypeError(f"{attention.__name__}.{name} must take {known}, got {found}")
    for i, block in enumerate(model.blocks):
        name = f"blocks.{i}"
        if type(block) is block_class and type(block.self_attn) is attention:
            forms = {"queries": QUERIES, "keys": KEYS, "rest": REST}
            # The host calls it by these names, and never as a module.
            places = tuple(Place(f"{name}:{part}", block, forms[part], True) for part in forms)
            methods = {name: _method(block, *each) for name, each in _METHODS.items()}
            plan.dispatches.append(Dispatch(block, places, methods))
        else:
            plan.outside.append((name, unknown_layer(block)))
    cut_heads(plan, model)
    return plan


def _host() -> tuple[Any, Any]:
    """The host's block class and its attention's."""
    from comfy.ldm.wan import model_animate2

    return model_animate2.WanAnimate2Block, model_animate2.WanAnimate2SelfAttention


class _Calls:
    """A block's region calls, for one call by the host."""

    def __init__(
        self,
        calls: Sequence[RegionCall],
        block: Any,
        e: Any,
        context: Any,
        length: Any,
        options: Any,
    ) -> None:
        self._queries, self._keys, self._rest = calls
        self._attention = block.self_attn
        self._modulation = of_all_frames(e, 3)
        self._context, self._length = context, length
        self.options: dict[str, Any] = {} if options is None else options

    def queries(self, x: torch.Tensor, freqs: torch.Tensor) -> Any:
        """Queries, keys and values; None if the host must."""
        reason = dit.changed(self.options)
        if self._modulation is None:
            reason = dit.FRAMES
        elif not isinstance(self._length, int) or self._length < 1:
            reason = NO_IMAGE
        return dit.serve(self._queries, reason, self.options, x, self._modulation, freqs)

    def attending(self, made: Any) -> Any:
        """The host's attention, with these already computed."""
        attention = shallow_copy(self._attention)
        attention.__dict__["qkv"] = lambda *_: made
        return attention

    def rest(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """What follows the attention; None if the host must."""
        image, text = dit.split(self._context, 1, self._length)
        return dit.serve(self._rest, None, self.options, x, y, self._modulation, text, image)


def _method(block: Any, arguments: Arguments, serve: Any) -> Method:
    return Method(arguments, lambda calls: partial(serve, block, calls))


def _pose(
    block: Any,
    calls: Sequence[RegionCall],
    options: dit.Options,
    x: torch.Tensor,
    e: torch.Tensor,
    freqs: torch.Tensor,
    context: torch.Tensor,
    length: Any,
) -> Any:
    """Compute the driving video."""
    mine = _Calls(calls, block, e, context, length, options)
    if (made := mine.queries(x, freqs)) is None:
        return None
    y, k, v = mine.attending(made).forward_pose(x, freqs, transformer_options=mine.options)
    result = mine.rest(x, y)
    return None if result is None else (result, k, v)


def _generated(
    block: Any,
    calls: Sequence[RegionCall],
    options: dit.Options,
    x: torch.Tensor,
    e: torch.Tensor,
    freqs: torch.Tensor,
    context: torch.Tensor,
    *others: Any,
) -> Any:
    """Compute the generated video."""
    *frames, strength, length = others
    mine = _Calls(calls, block, e, context, length, options)
    if (made := mine.queries(x, freqs)) is None:
        return None
    y = mine.attending(made).forward_gen(
        x, freqs, *frames, ref_strength=strength, transformer_options=mine.options
    )
    return mine.rest(x, y)


def _kept(
    _block: Any, calls: Sequence[RegionCall], _options: dit.Options, x: Any, e: Any, freqs: Any
) -> Any:
    """Compute keys and values of kept tokens."""
    modulation = of_all_frames(e, 3)
    if modulation is None:
        return calls[1].decline(dit.FRAMES)
    made = calls[1](x, modulation, freqs)
    return None if made is None else tuple(made)


_METHODS = {
    "forward_pose": (
        dit.takes(x=TAKEN, e=TAKEN, freqs=TAKEN, context=TAKEN, context_img_len=TAKEN),
        _pose,
    ),
    "forward_gen": (
        dit.takes(
            x=TAKEN,
            e=TAKEN,
            freqs=TAKEN,
            context=TAKEN,
            k_pose=TAKEN,
            v_pose=TAKEN,
            f_gen=TAKEN,
            hw=TAKEN,
            buffers=TAKEN,
            ref_strength=TAKEN,
            context_img_len=TAKEN,
        ),
        _generated,
    ),
    "kv_from_input": (dit.takes(x_pose=TAKEN, e=TAKEN, freqs=TAKEN), _kept),
}
