"""Which region plan serves a model; the only list of model families."""

from __future__ import annotations

from typing import Any

from . import unet
from .plan import Form, Plan

_FORMS = {unet.FAMILY: unet.FORMS}


def form_of(family: str, name: str) -> Form:
    """Return a form by the names that a description carries."""
    return _FORMS[family][name]


def plan_model(diffusion_model: Any) -> Plan | str:
    """Cut a host model into regions, or say in a line why it stays as it is."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    if type(diffusion_model) is UNetModel:
        return unet.plan_unet(diffusion_model)
    name = type(diffusion_model).__name__
    return f"no region plan for {name} yet: runs as without this node"
