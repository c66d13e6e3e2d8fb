"""Blocks of Wan's variants: Vace's, whose results are hints, and HuMo's, which attend to audio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..contract import InputSpec
from ..plans.binding import OR_NONE, TAKEN, Forward
from ..plans.plan import RegionCall, host_forward
from ..reasons import of
from . import dit
from .wan_blocks import Block, context_input, of_all_frames, of_frames, table_input

#: Tokens of what is heard with a frame.
_HEARD = 16

_UNHEARD = of("unheard")


class HintBlock(Block):
    """VaceWanAttentionBlock: as `Block`, between Vace's own products."""

    name = "hint_block"
    arguments = dit.takes(
        c=TAKEN, x=TAKEN, e=TAKEN, freqs=TAKEN, context=TAKEN, context_img_len=None
    )
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

    def serving(self, call: RegionCall, module: Any) -> Forward:
        """The host's products stay around the graph."""

        def serve(options: dit.Options, c: Any, x: Any, e: Any, freqs: Any, context: Any) -> Any:
            modulation = of_all_frames(e, 3)
            reason = dit.FRAMES if modulation is None else dit.changed(options)
            if reason is not None:
                return call.decline(reason)
            hint = module.before_proj(c) + x if module.block_id == 0 else c
            hint = dit.serve(call, None, options, hint, modulation, freqs, context)
            return None if hint is None else (module.after_proj(hint), hint)

        return serve


class SoundBlock(Block):
    """HuMo's WanAttentionBlockAudio: as `Block`, each frame attending to its `audio [batch, frames,
    16, A]`; `x [batch, frames, patches, C]`.
    """

    name = "sound_block"
    arguments = dit.takes(
        x=TAKEN, e=TAKEN, freqs=TAKEN, context=TAKEN, context_img_len=None, audio=OR_NONE
    )

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

    def serve(self, call: RegionCall, options: dit.Options, *inputs: Any) -> Any:
        """Cut the video into the frames of the audio."""
        x, e, freqs, context, audio = inputs
        modulation = of_all_frames(e, 3)
        frames = 0 if audio is None else audio.shape[1] // _HEARD
        reason = dit.changed(options)
        if modulation is None:
            reason = dit.FRAMES
        elif not frames or x.shape[1] % frames:
            reason = _UNHEARD
        if reason is not None:
            return call.decline(reason)
        heard = of_frames(audio, frames).contiguous()  # it comes with its channels first in memory
        parts = of_frames(x, frames), modulation, of_frames(freqs, frames)
        return dit.serve(call, None, options, *parts, context, heard)


HINT_BLOCK, SOUND_BLOCK = HintBlock(), SoundBlock()


def _plain_forward() -> Callable[..., Any]:
    from comfy.ldm.wan.model import WanAttentionBlock

    forward: Callable[..., Any] = WanAttentionBlock.forward
    return forward
