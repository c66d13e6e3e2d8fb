"""Regions of the host's Flux (1, 2, klein, Kontext, Fill; LongCat, Ovis) and its ControlNets, and
of Chroma and HunyuanVideo (1.5, HunyuanImage), which use its blocks.

Regions: two-stream blocks, one-stream blocks, the last layer. Embeddings, the rotation table,
modulations shared by blocks (Flux 2, Chroma) and HunyuanVideo's text refiner stay the host's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..contract import InputSpec
from ..plans.binding import TAKEN
from ..plans.family import Family, Inputs
from ..plans.plan import Form, Plan, RegionCall, host_forward, host_results
from ..reasons import Reason
from . import dit

NAME = "flux"


class Double(dit.Attending):
    """DoubleStreamBlock: `img [batch, img, C]`, `txt [batch, txt, C]`, the rotation table in two
    parts, modulation `vec [batch, C]` or twelve `[batch, 1, C]` -> `(img, txt)`.
    """

    family = NAME
    name = "double"
    parts = ("img_mlp", "txt_mlp")
    writes = (0, 1)
    arguments = dit.takes(
        img=TAKEN,
        txt=TAKEN,
        vec=TAKEN,
        pe=TAKEN,
        attn_mask=dit.MASKED,
        modulation_dims_img=dit.REFERENCES,
        modulation_dims_txt=dit.REFERENCES,
    )

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
        """Text is clamped into a new tensor if its dtype may overflow."""
        return position == 0 or dtype is not torch.float16

    def serve(self, call: RegionCall, options: dit.Options, *inputs: Any) -> Any:
        img, txt, vec, pe = inputs
        if (reason := _problem(options, pe)) is not None:
            return call.decline(reason)
        parts = dit.split(pe, 2, txt.shape[1])
        return dit.serve(call, None, options, img, txt, *parts, *_parts(vec))


class Single(dit.Attending):
    """SingleStreamBlock: `x [batch, tokens, C]`, the rotation table, modulation `vec [batch, C]` or
    three `[batch, 1, C]` -> as x.
    """

    family = NAME
    name = "single"
    writes = (0,)
    arguments = dit.takes(
        x=TAKEN, vec=TAKEN, pe=TAKEN, attn_mask=dit.MASKED, modulation_dims=dit.REFERENCES
    )

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

    def serve(self, call: RegionCall, options: dit.Options, *inputs: Any) -> Any:
        x, vec, pe = inputs
        return dit.serve(call, _problem(options, pe), options, x, pe, *_parts(vec))


DOUBLE, SINGLE, LAST = Double(), Single(), dit.LastLayer(NAME, "Flux")
FORMS: dict[str, Form] = {form.name: form for form in (DOUBLE, SINGLE, LAST)}


def plan_flux(model: Any, *, widens: bool = False) -> Plan:
    from comfy.ldm.flux import layers as host

    plan = Plan(symbols=dit.SYMBOLS)
    doubles, singles = host.DoubleStreamBlock, host.SingleStreamBlock
    dit.cut_stack(plan, model, "double_blocks", doubles, DOUBLE, widens=widens)
    dit.cut_stack(plan, model, "single_blocks", singles, SINGLE, widens=widens)
    dit.cut_last(plan, model, "final_layer", host.LastLayer, LAST)
    return plan


def plan_hunyuan(model: Any) -> Plan:
    """Cut a HunyuanVideo, or a HunyuanImage (two-sided patches). At 129 frames of 1280x720 the
    largest tensor exceeds 2**31 elements with batch 2, in one-stream blocks with batch 1.
    """
    return plan_flux(model, widens=len(model.patch_size) != 2)


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
    """Such a HunyuanVideo looks up its timestep among the run's, which waits for the GPU."""
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
    """A rotation table, computed by the host once a step, one per image."""
    return InputSpec(name, "float32", ("batch", 1, tokens, head // 2, 2, 2))


def _modulation(count: int, width: int, dtype: str, *, own: bool) -> tuple[InputSpec, ...]:
    """Modulation inputs: the vector for the block's own layer, or a shared layer's results."""
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


def _problem(options: dit.Options, pe: Any) -> Reason | None:
    """Why a block must run the host's code in this call, or None."""
    if not isinstance(pe, torch.Tensor) or pe.dim() != 6:
        return dit.NOT_ROTATED
    return dit.changed(options)
