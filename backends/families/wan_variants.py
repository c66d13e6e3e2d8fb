"""Blocks that variants of Wan have besides the plain ones: Vace's, whose results are hints for
those, and HuMo's, which hear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..contract import InputSpec
from . import dit
from .plan import Call, Forward, host_forward
from .wan_blocks import Block, context_input, of_all_frames, of_frames, table_input

#: Tokens of what is heard with a frame.
_HEARD = 16

_UNHEARD = "called with no sound for each frame"


class HintBlock(Block):
    """VaceWanAttentionBlock: as `Block`, between the products that Vace puts around its own."""

    name = "hint_block"
    children = ("norm1", "self_attn", "norm3", "cross_attn", "norm2", "ffn")
    hidden = ("block_id",)

    def label(self, module: Any) -> str:
        return f"Wan Vace block {module.dim}"

    def code(self) -> tuple[Callable[..., Any], ...]:
        return (_plain_forward(),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        result: torch.Tensor
        result = _plain_forward()(module, *inputs, None, transformer_options=dit.options())
        return result


class SoundBlock(Block):
    """HuMo's WanAttentionBlockAudio: as `Block`, where the tokens of each frame look at what is
    heard with it, `audio [batch, frames, 16, A]`: `x [batch, frames, patches, C]`.
    """

    name = "sound_block"

    def label(self, module: Any) -> str:
        return f"Wan block with sound {module.dim}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        heard = module.audio_cross_attn_wrapper.audio_cross_attn.k.in_features
        return (
            InputSpec("x", dtype, ("batch", "frames", "patches", module.dim)),
            InputSpec("e", dtype, ("batch", 6, module.dim)),
            table_input(module, ("frames", "patches")),
            context_input("context", "txt", module, dtype),
            InputSpec("audio", dtype, ("batch", "frames", _HEARD, heard)),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, e, freqs, context, audio = inputs
        return host_forward(
            module,
            x.flatten(1, 2),
            e,
            freqs.flatten(1, 2),
            context,
            None,
            audio=audio.flatten(1, 2),
            transformer_options=dit.options(),
        )


HINT_BLOCK, SOUND_BLOCK = HintBlock(), SoundBlock()


def _plain_forward() -> Callable[..., Any]:
    from comfy.ldm.wan.model import WanAttentionBlock

    forward: Callable[..., Any] = WanAttentionBlock.forward
    return forward


def serve_hint(block: Any, call: Call, host: Forward) -> Forward:
    """Make the forward of Vace's block: the host's products around the graph."""

    def forward(
        c: torch.Tensor,
        x: torch.Tensor,
        e: torch.Tensor,
        freqs: torch.Tensor,
        context: torch.Tensor,
        context_img_len: Any = 257,
        transformer_options: dict[str, Any] | None = None,
    ) -> Any:
        options = {} if transformer_options is None else transformer_options
        modulation = of_all_frames(e, 3)
        reason = dit.FRAMES if modulation is None else dit.changed(options)
        if reason is not None:
            call.decline(reason)
            return host()
        hint = block.before_proj(c) + x if block.block_id == 0 else c
        hint = dit.serve(call, None, options, hint, modulation, freqs, context)
        return host() if hint is None else (block.after_proj(hint), hint)

    return forward


def serve_sound(call: Call, host: Forward) -> Forward:
    """Make the forward of HuMo's block, which cuts the video into the frames that are heard."""

    def forward(
        x: torch.Tensor,
        e: torch.Tensor,
        freqs: torch.Tensor,
        context: torch.Tensor,
        context_img_len: Any = 257,
        audio: torch.Tensor | None = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        options = {} if transformer_options is None else transformer_options
        modulation = of_all_frames(e, 3)
        frames = 0 if audio is None else audio.shape[1] // _HEARD
        reason = dit.changed(options)
        if modulation is None:
            reason = dit.FRAMES
        elif not frames or x.shape[1] % frames:
            reason = _UNHEARD
        result: torch.Tensor | None
        if reason is None:
            assert audio is not None
            # It comes with its channels first in memory.
            heard = of_frames(audio, frames).contiguous()
            parts = of_frames(x, frames), modulation, of_frames(freqs, frames)
            result = dit.serve(call, None, options, *parts, context, heard)
        else:
            result = call.decline(reason)
        return host() if result is None else result

    return forward
