"""The region plan of the host's Flux (Flux 1, Flux 2, klein, Kontext, Fill; LongCat and Ovis), of
Chroma and HunyuanVideo (1.5 and HunyuanImage, too), which are made of its blocks, and of Flux's
ControlNets.

Regions: blocks of two streams, blocks of one, the last layer. Embeddings, the rotation table, the
modulations that the blocks of Flux 2 and Chroma share and HunyuanVideo's refiner of text tokens
stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..contract import InputSpec
from . import dit
from .family import Family, Inputs
from .plan import Call, Form, Forward, Plan, host_forward, host_results

NAME = "flux"


class Double(dit.Attending):
    """DoubleStreamBlock: `img [batch, img, C]`, `txt [batch, txt, C]`, the rotation table in two
    parts, and what modulates: `vec [batch, C]`, or twelve `[batch, 1, C]` -> `(img, txt)`.
    """

    family = NAME
    name = "double"
    parts = ("img_mlp", "txt_mlp")
    writes = (0, 1)

    def label(self, module: Any) -> str:
        return f"Flux double block {module.hidden_size}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width, head = module.hidden_size, module.hidden_size // module.num_heads
        return (
            InputSpec("img", dtype, ("batch", "img", width)),
            InputSpec("txt", dtype, ("batch", "txt", width)),
            _table("pe_txt", "txt", head),
            _table("pe_img", "img", head),
            *_modulation(12, width, dtype, own=module.modulation),
        )

    def reference(self, module: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        img, txt, pe_txt, pe_img, *given = inputs
        vec = given[0] if module.modulation else _pairs(given)
        pe = torch.cat((pe_txt, pe_img), 2)
        return host_results(
            module, img=img, txt=txt, vec=vec, pe=pe, transformer_options=dit.options()
        )

    def gives_back(self, position: int, dtype: torch.dtype) -> bool:
        """The text's is bounded, in a tensor of its own, where its dtype may overflow."""
        return position == 0 or dtype is not torch.float16


class Single(dit.Attending):
    """SingleStreamBlock: `x [batch, tokens, C]`, the rotation table, and what modulates: `vec
    [batch, C]`, or three `[batch, 1, C]` -> as x.
    """

    family = NAME
    name = "single"
    writes = (0,)

    def label(self, module: Any) -> str:
        return f"Flux single block {module.hidden_size}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width, head = module.hidden_size, module.hidden_size // module.num_heads
        return (
            InputSpec("x", dtype, ("batch", "tokens", width)),
            _table("pe", "tokens", head),
            *_modulation(3, width, dtype, own=module.modulation is not None),
        )

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        x, pe, *given = inputs
        vec = given[0] if module.modulation is not None else _one(given)
        return host_forward(module, x, vec=vec, pe=pe, transformer_options=dit.options())

    def gives_back(self, position: int, dtype: torch.dtype) -> bool:
        """As the text of `Double`."""
        return dtype is not torch.float16


class Last(dit.LastLayer):
    """LastLayer: `x [batch, img, C]`, `vec [batch, C]` -> `[batch, img, patch]`."""

    family = NAME

    def label(self, module: Any) -> str:
        return f"Flux last layer {module.linear.in_features}"


class VideoDouble(Double):
    """As `Double`, of a video: of 129 frames of 1280x720 the largest tensor passes 2**31 elements
    where two run at once, and `Single`'s where one does.
    """

    name = "video_double"
    widens = True

    def label(self, module: Any) -> str:
        return f"HunyuanVideo double block {module.hidden_size}"


class VideoSingle(Single):
    """As `Single`, of a video."""

    name = "video_single"
    widens = True

    def label(self, module: Any) -> str:
        return f"HunyuanVideo single block {module.hidden_size}"


DOUBLE, SINGLE, LAST = Double(), Single(), Last()
VIDEO_DOUBLE, VIDEO_SINGLE = VideoDouble(), VideoSingle()
FORMS: dict[str, Form] = {
    form.name: form for form in (DOUBLE, SINGLE, LAST, VIDEO_DOUBLE, VIDEO_SINGLE)
}


def plan_flux(model: Any) -> Plan:
    """Cut a Flux, or what is made of its blocks, into regions."""
    return _plan(model, DOUBLE, SINGLE)


def plan_hunyuan(model: Any) -> Plan:
    """Cut a HunyuanVideo into regions; with patches of two sides it is a HunyuanImage."""
    if len(model.patch_size) == 2:
        return _plan(model, DOUBLE, SINGLE)
    return _plan(model, VIDEO_DOUBLE, VIDEO_SINGLE)


def _plan(model: Any, double: Form, single: Form) -> Plan:
    from comfy.ldm.flux import layers as host

    plan = Plan(symbols=dit.SYMBOLS)
    dit.cut_stack(plan, model, "double_blocks", host.DoubleStreamBlock, double, _double)
    dit.cut_stack(plan, model, "single_blocks", host.SingleStreamBlock, single, _single)
    dit.cut_last(plan, model, "final_layer", host.LastLayer, LAST)
    return plan


def _empty(model: Any, _: Mapping[str, Any], latent: tuple[int, ...]) -> Inputs:
    rows, channels, *sides = latent
    params, width = model.params, model.params.context_in_dim
    given: Inputs = {"c_crossattn": (rows, 256, width), "guidance": (rows,)}
    if getattr(params, "vec_in_dim", None):
        given["y"] = (rows, params.vec_in_dim)
    channels_in = model.in_channels
    if isinstance(model.patch_size, int):  # Flux counts those of a patch
        channels_in //= model.patch_size**2
    if more := channels_in - channels:  # an image, and mostly a mask
        given["c_concat"] = (rows, more, *sides)
    if _has_mean_flow(model):
        given["disable_time_r"] = True  # outside of a run there is no next timestep
    return given


def _has_mean_flow(model: Any) -> bool:
    """A HunyuanVideo with one looks its timestep up among the run's, which waits for the GPU."""
    return getattr(model, "time_r_in", None) is not None


_KNOWN = dit.calls_of("Flux", "Chroma", "HunyuanVideo")


def _may_be_captured(model: torch.nn.Module) -> bool:
    return _KNOWN(model) and not _has_mean_flow(model)


FAMILY = Family(
    title="Flux 1, Flux 2, Chroma, HunyuanVideo",
    roots={
        "comfy.ldm.flux.model:Flux": plan_flux,
        "comfy.ldm.flux.controlnet:ControlNetFlux": plan_flux,
        "comfy.ldm.chroma.model:Chroma": plan_flux,
        "comfy.ldm.hunyuan_video.model:HunyuanVideo": plan_hunyuan,
    },
    forms=FORMS,
    may_be_captured=_may_be_captured,
    unread=dit.UNREAD_OPTIONS,
    empty=_empty,
)


def _table(name: str, tokens: str, head: int) -> InputSpec:
    """A rotation table, which the host computes once a step: each image has its own."""
    return InputSpec(name, "float32", ("batch", 1, tokens, head // 2, 2, 2))


def _modulation(count: int, width: int, dtype: str, *, own: bool) -> tuple[InputSpec, ...]:
    """What modulates a block: the vector for its own layer, or what a shared one made of it."""
    if own:
        return (InputSpec("vec", dtype, ("batch", width)),)
    return tuple(InputSpec(f"mod_{i}", dtype, ("batch", 1, width)) for i in range(count))


def _one(parts: Sequence[torch.Tensor]) -> Any:
    from comfy.ldm.flux.layers import ModulationOut

    return ModulationOut(*parts)


def _pairs(parts: Sequence[torch.Tensor]) -> Any:
    first, second, third, fourth = (_one(parts[i : i + 3]) for i in range(0, 12, 3))
    return (first, second), (third, fourth)


def _parts(modulation: Any) -> list[torch.Tensor]:
    """The tensors of a modulation, or of pairs of them, in the order of `_pairs`."""
    if isinstance(modulation, torch.Tensor):
        return [modulation]
    if isinstance(modulation, tuple):
        return [part for each in modulation for part in _parts(each)]
    return [modulation.shift, modulation.scale, modulation.gate]


def _problem(options: dict[str, Any], mask: Any, pe: Any, *dims: Any) -> str | None:
    """Why a block must run the host's code in this call, or None."""
    if mask is not None:
        return dit.MASKED
    if any(each is not None for each in dims):
        return dit.REFERENCES
    if not isinstance(pe, torch.Tensor) or pe.dim() != 6:
        return dit.NOT_ROTATED
    return dit.changed(options)


def _double(call: Call, host: Forward) -> Any:
    def forward(
        img: torch.Tensor,
        txt: torch.Tensor,
        vec: Any,
        pe: Any,
        attn_mask: Any = None,
        modulation_dims_img: Any = None,
        modulation_dims_txt: Any = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> Any:
        options = {} if transformer_options is None else transformer_options
        reason = _problem(options, attn_mask, pe, modulation_dims_img, modulation_dims_txt)
        if reason is None:
            parts = dit.split(pe, 2, txt.shape[1])
            results = dit.serve(call, None, options, img, txt, *parts, *_parts(vec))
            if results is not None:
                return results
        else:
            call.decline(reason)
        return host()

    return forward


def _single(call: Call, host: Forward) -> Forward:
    def forward(
        x: torch.Tensor,
        vec: Any,
        pe: Any,
        attn_mask: Any = None,
        modulation_dims: Any = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        options = {} if transformer_options is None else transformer_options
        reason = _problem(options, attn_mask, pe, modulation_dims)
        result: torch.Tensor | None = dit.serve(call, reason, options, x, pe, *_parts(vec))
        if result is not None:
            return result
        return host()

    return forward
