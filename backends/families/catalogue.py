"""Which region plan serves a model; the only list of model families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kinds.packs import foreign_class
from . import adapter, control, unet, vae, wan
from .plan import Form, Plan

_FORMS: dict[tuple[str, str], Form] = {
    (form.family, form.name): form
    for forms in (unet.FORMS, vae.FORMS, control.FORMS, adapter.FORMS, wan.FORMS)
    for form in forms.values()
}

#: The plan of each class of the host, by the class's full name: to ask imports nothing.
_PLANS: dict[str, Callable[[Any], Plan]] = {
    "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel": unet.plan_unet,
    "comfy.cldm.cldm:ControlNet": control.plan_control,
    "comfy.t2i_adapter.adapter:Adapter": adapter.plan_adapter,
    "comfy.ldm.models.autoencoder:AutoencoderKL": vae.plan_vae,
    "comfy.ldm.models.autoencoder:AutoencodingEngine": vae.plan_vae,
    "comfy.ldm.models.autoencoder:AutoencodingEngineLegacy": vae.plan_vae,
    "comfy.taesd.taesd:TAESD": vae.plan_taesd,
    "comfy.ldm.wan.vae:WanVAE": wan.plan_wan,
    "comfy.ldm.wan.vae2_2:WanVAE": wan.plan_wan,
}


def form_of(family: str, name: str) -> Form:
    """Return a form by the names that a description carries."""
    return _FORMS[family, name]


def plan_model(root: torch.nn.Module) -> Plan | str:
    """Cut a model of the host into regions, or say in a line why it stays as it is."""
    cls = type(root)
    cut = _PLANS.get(_full_name(cls))
    if cut is None and (owner := foreign_class(cls)) is not None:
        return f"{owner}: runs as without this node"
    if cut is None:
        return f"no region plan for {cls.__name__} yet: runs as without this node"
    plan = cut(root)
    if not plan.dispatches:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in plan.outside)) or "no known block"
        return f"nothing of this {cls.__name__} can be compiled ({reasons}): runs as without it"
    return plan


def may_be_swapped(root: torch.nn.Module) -> bool:
    """Tell whether a model's class may have been put in place of one that is known here: nodes do
    so for as long as their clone of the model is loaded.
    """
    _, *parents = type(root).__mro__
    return any(_full_name(parent) in _PLANS for parent in parents)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
