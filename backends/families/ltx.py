"""Regions of the host's LTX-Video and LTX-2: blocks of video, or of video and audio.

Embeddings, timesteps, rotation tables, text connectors and output layers stay the host's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..host_api import attention
from ..plans.binding import OR_NONE, TAKEN
from ..plans.family import Family, Inputs
from ..plans.plan import Form, Plan, RegionCall, host_forward, host_results
from ..reasons import Reason, of
from . import dit

NAME = "ltx"

#: Tokens sharing a timestep, and the number of groups: frames if some are known, a whole stream if
#: none is, single tokens if parts of frames are.
SYMBOLS = dit.SYMBOLS | {
    s.name: s
    for s in (
        Symbol("frames", 1, 2**18, 16),
        Symbol("patches", 1, 2**18, 880),
        Symbol("times", 1, 2**15, 126),
        Symbol("sounds", 1, 2**15, 2),
    )
}

STREAMS = of("streams")
PERTURBED = of("perturbed")
_UNEVEN = of("uneven")
#: Masks: of guides with a strength of their own, among the video's tokens, and of a text.
_GUIDES, _TEXT = "guides", "text"

#: Options that leave parts of a block out: what they are unless set.
_FLAGS = {"run_vx": True, "run_ax": True, "a2v_cross_attn": True, "v2a_cross_attn": True}

#: Modulation per group of tokens, the number of groups, tokens per group.
_Groups = tuple[list[torch.Tensor], tuple[int, int]]


class Block(dit.Attending):
    """BasicAVTransformerBlock: `vx [batch, frames, patches, V]`, `ax [batch, times, sounds, A]`, a
    text for each, modulation of each per group of tokens, four rotation tables -> (vx, ax).
    """

    family = NAME
    name = "block"
    writes = (0, 1)
    parts = (
        *("attn1", "attn2", "audio_attn1", "audio_attn2"),
        *("audio_to_video_attn", "video_to_audio_attn", "ff", "audio_ff"),
    )
    arguments = dit.takes(
        x=TAKEN,
        v_context=OR_NONE,
        a_context=OR_NONE,
        attention_mask=OR_NONE,
        v_timestep=OR_NONE,
        a_timestep=OR_NONE,
        v_pe=OR_NONE,
        a_pe=OR_NONE,
        v_cross_pe=OR_NONE,
        a_cross_pe=OR_NONE,
        v_cross_scale_shift_timestep=OR_NONE,
        a_cross_scale_shift_timestep=OR_NONE,
        v_cross_gate_timestep=OR_NONE,
        a_cross_gate_timestep=OR_NONE,
        self_attention_mask=OR_NONE,
        v_prompt_timestep=OR_NONE,
        a_prompt_timestep=OR_NONE,
    )
    #: Whether a row's first half is rotated with its second.
    halves = True

    def label(self, module: Any) -> str:
        return f"LTX audio-video block {module.attn1.to_q.in_features}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        video, audio, cross = module.attn1, module.audio_attn1, module.audio_to_video_attn
        v, a = video.to_q.in_features, audio.to_q.in_features
        count = module.scale_shift_table.shape[0]
        of_v, of_a = ("frames", "patches"), ("times", "sounds")

        def groups(name: str, of: tuple[str, str], width: int) -> InputSpec:
            return InputSpec(name, dtype, ("batch", of[0], width))

        prompts = (
            InputSpec("v_prompt", dtype, ("batch", 1, 2 * v)),
            InputSpec("a_prompt", dtype, ("batch", 1, 2 * a)),
        )
        return (
            InputSpec("vx", dtype, ("batch", *of_v, v)),
            InputSpec("ax", dtype, ("batch", *of_a, a)),
            InputSpec("v_context", dtype, ("batch", "txt", module.attn2.to_k.in_features)),
            InputSpec("a_context", dtype, ("batch", "txt", module.audio_attn2.to_k.in_features)),
            groups("v_time", of_v, count * v),
            groups("a_time", of_a, count * a),
            groups("v_cross_time", of_v, 4 * v),
            groups("a_cross_time", of_a, 4 * a),
            groups("v_cross_gate", of_v, v),
            groups("a_cross_gate", of_a, a),
            _table("v_table", of_v, video, dtype),
            _table("a_table", of_a, audio, dtype),
            _table("v_cross_table", of_v, cross, dtype),
            _table("a_cross_table", of_a, cross, dtype),
            *(prompts if module.cross_attention_adaln else ()),
        )

    def code(self) -> tuple[Callable[..., Any], ...]:
        from comfy.ldm.lightricks.av_model import CompressedTimestep

        return CompressedTimestep.__init__, CompressedTimestep.expand_for_computation

    def reference(self, module: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        from comfy.ldm.lightricks.av_model import CompressedTimestep

        vx, ax, v_context, a_context, *rest = inputs
        sizes = vx.shape[2], ax.shape[2]
        v_time, a_time, v_cross, a_cross, v_gate, a_gate = (
            CompressedTimestep(each, sizes[i % 2], per_frame=True)
            for i, each in enumerate(rest[:6])
        )
        tables = ((each.flatten(1, 2), self.halves) for each in rest[6:10])
        v_table, a_table, v_cross_table, a_cross_table = tables
        v_prompt, a_prompt = rest[10:] or (None, None)
        video, audio = host_results(
            module,
            (vx.flatten(1, 2), ax.flatten(1, 2)),
            v_context=v_context,
            a_context=a_context,
            v_timestep=v_time,
            a_timestep=a_time,
            v_pe=v_table,
            a_pe=a_table,
            v_cross_pe=v_cross_table,
            a_cross_pe=a_cross_table,
            v_cross_scale_shift_timestep=v_cross,
            a_cross_scale_shift_timestep=a_cross,
            v_cross_gate_timestep=v_gate,
            a_cross_gate_timestep=a_gate,
            transformer_options=dit.options(),
            attention_mask=dit.mask(_TEXT),
            self_attention_mask=dit.mask(_GUIDES),
            v_prompt_timestep=v_prompt,
            a_prompt_timestep=a_prompt,
        )
        return video.view(vx.shape), audio.view(ax.shape)


class Neighbours(Block):
    """As `Block`, rotating neighbouring elements of a row."""

    name = "neighbours"
    halves = False


class VideoBlock(dit.Attending):
    """BasicTransformerBlock: `x [batch, frames, patches, C]`, `context [batch, txt, C]`, modulation
    per group of tokens, the rotation table -> as x.
    """

    family = NAME
    name = "video"
    writes = (0,)
    parts = ("attn1", "attn2", "ff")
    arguments = dit.takes(
        x=TAKEN,
        context=OR_NONE,
        attention_mask=OR_NONE,
        timestep=OR_NONE,
        pe=OR_NONE,
        self_attention_mask=OR_NONE,
        prompt_timestep=OR_NONE,
    )
    halves = False

    def label(self, module: Any) -> str:
        return f"LTX video block {module.attn1.to_q.in_features}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width = module.attn1.to_q.in_features
        count = module.scale_shift_table.shape[0]
        of = ("frames", "patches")
        prompt = InputSpec("prompt", dtype, ("batch", 1, 2 * width))
        return (
            InputSpec("x", dtype, ("batch", *of, width)),
            InputSpec("context", dtype, ("batch", "txt", module.attn2.to_k.in_features)),
            InputSpec("time", dtype, ("batch", "frames", count * width)),
            _table("table", of, module.attn1, dtype),
            *((prompt,) if module.cross_attention_adaln else ()),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, context, time, table, *prompt = inputs
        each = time[:, :, None].expand(-1, -1, x.shape[2], -1).flatten(1, 2)
        result = host_forward(
            module,
            x.flatten(1, 2),
            context=context,
            attention_mask=dit.mask(_TEXT),
            timestep=each,
            pe=(table.flatten(1, 2), self.halves),
            transformer_options=dit.options(),
            self_attention_mask=dit.mask(_GUIDES),
            prompt_timestep=prompt[0] if prompt else None,
        )
        return result.view(x.shape)

    def serve(self, call: RegionCall, options: dit.Options, *inputs: Any) -> Any:
        x, context, mask, timestep, pe, guides, prompt = inputs
        reason = _problem(options, guides, {})
        parts = _by_groups((timestep,), x)
        if reason is not None or parts is None:
            return call.decline(reason or _UNEVEN)
        (time,), sides = parts
        served = dit.serve(
            call,
            None,
            options,
            x.unflatten(1, sides),
            context,
            time,
            pe[0].unflatten(1, sides),
            *(() if prompt is None else (prompt,)),
            live={_GUIDES: guides, _TEXT: mask},
        )
        return None if served is None else x


class VideoHalves(VideoBlock):
    """As `VideoBlock`, rotating a row's first half with its second."""

    name = "video_halves"
    halves = True


BLOCK, NEIGHBOURS = Block(), Neighbours()
VIDEO, VIDEO_HALVES = VideoBlock(), VideoHalves()
FORMS: dict[str, Form] = {f.name: f for f in (BLOCK, NEIGHBOURS, VIDEO, VIDEO_HALVES)}


def plan_video(model: Any) -> Plan:
    from comfy.ldm.lightricks import model as host

    plan = Plan(symbols=SYMBOLS)
    form = VIDEO_HALVES if _rotates_halves(model) else VIDEO
    dit.cut_stack(plan, model, "transformer_blocks", host.BasicTransformerBlock, form)
    return plan


def plan_both(model: Any) -> Plan:
    from comfy.ldm.lightricks import av_model as host

    plan = Plan(symbols=SYMBOLS)
    form = BLOCK if _rotates_halves(model) else NEIGHBOURS
    cls, serve = host.BasicAVTransformerBlock, partial(_both, _Texts())
    dit.cut_stack(plan, model, "transformer_blocks", cls, form, serve=serve)
    return plan


def _empty(model: Any, _: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs | None:
    rows, text = latent[0], model.caption_channels
    if type(model).__name__ == "LTXVModel":
        return {"c_crossattn": (rows, 128, text), "attention_mask": None}
    width = 2 * text
    if model.caption_proj_before_connector:
        width = model.cross_attention_dim + model.audio_cross_attention_dim
    sounds = (rows, model.num_audio_channels, 8, model.audio_frequency_bins)
    return {"c_crossattn": (rows, 1024, width), "latent_shapes": [latent, sounds]}


FAMILY = Family(
    title="LTX-Video, LTX-2",
    roots={
        "comfy.ldm.lightricks.model:LTXVModel": plan_video,
        "comfy.ldm.lightricks.av_model:LTXAVModel": plan_both,
    },
    forms=FORMS,
    unread=dit.UNREAD_OPTIONS,
    guided_together=True,
    empty=_empty,
)


def _rotates_halves(model: Any) -> bool:
    return bool(model.split_positional_embedding.value == "split")


def _table(name: str, tokens: tuple[str, str], layer: Any, dtype: str) -> InputSpec:
    """A rotation table, by token and head."""
    sides = (layer.heads, layer.dim_head // 2, 2, 2)
    return InputSpec(name, dtype, ("batch", *tokens, *sides))


def _problem(options: dit.Options, guides: Any, flags: Mapping[str, bool]) -> Reason | None:
    """Why a block must run the host's code in this call. That code asks for no patches inside."""
    options = options or {}
    if not attention.may_attend_under(guides):
        return dit.MASKED
    if any(options.get(name, usual) != usual for name, usual in flags.items()):
        return STREAMS
    return PERTURBED if options.get("stg_skip_self_attn") else None


class _Texts:
    """Texts of video and audio, which the host passes as column views of one tensor: made
    contiguous once per call, freed with their source.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self._known: tuple[torch.Tensor, ...] = ()

    def __call__(self, video: Any, audio: Any) -> tuple[Any, ...]:
        if not all(type(text) is torch.Tensor for text in (video, audio)):
            return video, audio
        if video.is_contiguous() and audio.is_contiguous():
            return video, audio
        if self._of is None or self._of() is not video:
            self._known = video.contiguous(), audio.contiguous()
            self._of = weakref.ref(video, self._let_go)
        return self._known

    def _let_go(self, ref: Any) -> None:
        if self._of is ref:
            self._of, self._known = None, ()


def _both(texts: _Texts, call: RegionCall, options: dit.Options, *inputs: Any) -> Any:
    """Compute a block of video and audio."""
    (vx, ax), v_context, a_context, mask, v_time, a_time, *tables = inputs[:10]
    v_cross, a_cross, v_gate, a_gate, guides, *prompts = inputs[10:]
    reason = _problem(options, guides, _FLAGS) if ax.numel() else STREAMS
    video = _by_groups((v_time, v_cross, v_gate), vx)
    audio = _by_groups((a_time, a_cross, a_gate), ax)
    if reason is not None or video is None or audio is None:
        return call.decline(reason or _UNEVEN)
    (v_groups, v_sides), (a_groups, a_sides) = video, audio
    sides = (v_sides, a_sides, v_sides, a_sides)
    served = dit.serve(
        call,
        None,
        options,
        vx.unflatten(1, v_sides),
        ax.unflatten(1, a_sides),
        *texts(v_context, a_context),
        *(each for both in zip(v_groups, a_groups, strict=True) for each in both),
        *(table[0].unflatten(1, each) for table, each in zip(tables, sides, strict=True)),
        *(() if prompts[0] is None else prompts),
        live={_GUIDES: guides, _TEXT: mask},
    )
    return None if served is None else (vx, ax)  # which hold the results


def _by_groups(times: tuple[Any, ...], x: torch.Tensor) -> _Groups | None:
    """Group a stream by its modulation, by frames if the host has it so; None if groups differ in
    size.
    """
    found = [time if isinstance(time, torch.Tensor) else time.data for time in times]
    groups, tokens = found[0].shape[1], x.shape[1]
    if not tokens or tokens % groups or any(each.shape[1] != groups for each in found):
        return None
    return found, (groups, tokens // groups)
