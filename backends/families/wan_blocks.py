"""Blocks of the host's Wan and their forwards: plain, with an image, with a timestep per frame; the
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..contract import InputSpec
from ..plans.binding import TAKEN, Arguments, Forward
from ..plans.plan import Form, Place, Plan, RegionCall, dispatch_one, host_forward
from ..reasons import of
from . import dit

NAME = "wan"

NO_IMAGE = of("no_image")
_UNEVEN = of("uneven")


class Block(dit.Attending):
    """WanAttentionBlock: `x [batch, img, C]`, modulation `e [batch, 6, C]`, rotation table,
    `context [batch, txt, C]` -> as x.
    """

    family = NAME
    name = "block"
    arguments = dit.takes(x=TAKEN, e=TAKEN, freqs=TAKEN, context=TAKEN, context_img_len=None)
    parts = ("self_attn", "cross_attn", "ffn")

    def label(self, module: Any) -> str:
        return f"Wan block {module.dim}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("x", dtype, ("batch", "img", module.dim)),
            InputSpec("e", dtype, ("batch", 6, module.dim)),
            table_input(module, ("img",)),
            context_input("context", "txt", module, dtype),
        )

    def handed_on(self, module: Any) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(("context", "context_img"), ("cross_attn",))

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, e, freqs, context = inputs
        return host_forward(module, x, e, freqs, context, None, transformer_options=dit.options())


class ImageBlock(Block):
    """As `Block`, also attending to `context_img [batch, clip, C]` (2.1 image-to-video)."""

    name = "image_block"
    arguments = dit.takes(x=TAKEN, e=TAKEN, freqs=TAKEN, context=TAKEN, context_img_len=TAKEN)

    def label(self, module: Any) -> str:
        return f"Wan image-to-video block {module.dim}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            *Block.inputs(self, module, dtype),
            context_input("context_img", "clip", module, dtype),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, e, freqs, text, image = inputs
        context = torch.cat((image, text), 1)
        length = image.shape[1]
        return host_forward(module, x, e, freqs, context, length, transformer_options=dit.options())

    def serve(self, call: RegionCall, options: dit.Options, *inputs: Any) -> Any:
        """The image's tokens precede the text's."""
        x, e, freqs, context, length = inputs
        modulation = of_all_frames(e, 3)
        reason = dit.changed(options)
        if modulation is None:
            reason = dit.FRAMES
        elif not isinstance(length, int) or length < 1:
            reason = NO_IMAGE
        if reason is not None:
            return call.decline(reason)
        image, text = dit.split(context, 1, length)
        return dit.serve(call, None, options, x, modulation, freqs, text, image)


class FrameBlock(Block):
    """As `Block`, timed by frame: `x [batch, frames, patches, C]`, `e [batch, frames, 6, C]`."""

    name = "frame_block"

    def label(self, module: Any) -> str:
        return f"Wan block of timed frames {module.dim}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("x", dtype, ("batch", "frames", "patches", module.dim)),
            InputSpec("e", dtype, ("batch", "frames", 6, module.dim)),
            table_input(module, ("frames", "patches")),
            context_input("context", "txt", module, dtype),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, e, freqs, context = inputs
        tokens = x.flatten(1, 2)
        return host_forward(
            module, tokens, e, freqs.flatten(1, 2), context, None, transformer_options=dit.options()
        )

    def serve(self, call: RegionCall, options: dit.Options, *inputs: Any) -> Any:
        x, e, freqs, context = inputs
        if e.dim() != 4 or x.shape[1] % e.shape[1]:
            return call.decline(_UNEVEN)
        parts = of_frames(x, e.shape[1]), e, of_frames(freqs, e.shape[1])
        return dit.serve(call, dit.changed(options), options, *parts, context)


class Head(Form):
    """Head: `x [batch, img, C]`, `e [batch, C]` -> `[batch, img, patch]`."""

    family = NAME
    name = "head"
    arguments = Arguments(x=TAKEN, e=TAKEN)

    def label(self, module: Any) -> str:
        return f"Wan head {module.dim}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("x", dtype, ("batch", "img", module.dim)),
            InputSpec("e", dtype, ("batch", module.dim)),
        )

    def serving(self, call: RegionCall, module: Any) -> Forward:
        def serve(x: torch.Tensor, e: torch.Tensor) -> Any:
            modulation = of_all_frames(e, 2)
            return call.decline(dit.FRAMES) if modulation is None else call(x, modulation)

        return serve


BLOCK, IMAGE_BLOCK, FRAME_BLOCK, HEAD = Block(), ImageBlock(), FrameBlock(), Head()


def cut_heads(plan: Plan, model: Any) -> None:
    """Make each head a region; WanDancer has two."""
    from comfy.ldm.wan.model import Head as HostHead

    for name in ("head", "head_global"):
        head: Any = getattr(model, name, None)
        if type(head) is HostHead:
            plan.dispatches.append(dispatch_one(Place(name, head, HEAD, widens=True)))


def table_input(module: Any, tokens: tuple[str, ...]) -> InputSpec:
    """The rotation table, one for all videos, computed by the host once a step."""
    half = module.dim // module.num_heads // 2
    return InputSpec("freqs", "float32", (1, *tokens, 1, half, 2, 2))


def context_input(name: str, tokens: str, module: Any, dtype: str) -> InputSpec:
    return InputSpec(name, dtype, ("batch", tokens, module.dim))


def of_all_frames(e: torch.Tensor, dims: int) -> torch.Tensor | None:
    """The modulation that all frames share, without their dimension; None if they differ."""
    if e.dim() == dims:
        return e
    return e.squeeze(1) if e.dim() == dims + 1 and e.shape[1] == 1 else None


def of_frames(tokens: torch.Tensor, frames: int) -> torch.Tensor:
    """Tokens by frames: `[batch, frames * n, ...]` -> `[batch, frames, n, ...]`."""
    batch, _, *rest = tokens.shape
    return tokens.reshape(batch, frames, -1, *rest)


def serve_block(
    calls: Sequence[RegionCall], options: dit.Options, x: Any, e: Any, freqs: Any, context: Any
) -> Any:
    """Compute a plain block, by its second call where each frame has a timestep."""
    plain, *more = calls
    modulation = of_all_frames(e, 3)
    if modulation is None and more:
        return FRAME_BLOCK.serve(more[0], options, x, e, freqs, context)
    reason = dit.FRAMES if modulation is None else dit.changed(options)
    return dit.serve(plain, reason, options, x, modulation, freqs, context)
