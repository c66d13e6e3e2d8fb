"""The only list of model families, by the class of the root module."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from ..code.packs import foreign_class, is_known
from ..contract import RegionSpec
from ..host_api.options import UNREAD
from ..learning.family import family_of
from ..learning.form import NAME as LEARNED
from ..learning.form import Learned
from ..learning.values import name_of
from ..plans.family import Family, Inputs
from ..plans.plan import Form, Plan
from ..plans.region_code import RegionCode
from ..reasons import Reason, joined, of
from . import (
    adapter,
    control,
    cosmos,
    flux,
    image_vae,
    int8_product,
    krea,
    ltx,
    ltx_vae,
    lumina,
    minimax,
    minimax_vae,
    packed_weight,
    qwen,
    qwen21,
    sd3,
    unet,
    wan,
    wan_vae,
    whole,
)

FAMILIES = (
    unet.FAMILY,
    control.FAMILY,
    adapter.FAMILY,
    cosmos.FAMILY,
    flux.FAMILY,
    krea.FAMILY,
    ltx.FAMILY,
    lumina.FAMILY,
    minimax.FAMILY,
    qwen.FAMILY,
    qwen21.FAMILY,
    sd3.FAMILY,
    wan.FAMILY,
    whole.FAMILY,
    image_vae.FAMILY,
    wan_vae.FAMILY,
    ltx_vae.FAMILY,
    minimax_vae.FAMILY,
    int8_product.FAMILY,
    packed_weight.FAMILY,
)

#: Raised by models that another host version builds otherwise.
_UNLIKE = (AttributeError, ImportError, LookupError, TypeError, ValueError)

_FORMS: dict[tuple[str, str], Form] = {
    (form.family, form.name): form for family in FAMILIES for form in family.forms.values()
}
_TITLES: dict[str, str] = {
    form.family: family.title for family in FAMILIES for form in family.forms.values()
}
_TITLES[LEARNED] = "Learned models"
#: By the full name of a root's class: to ask imports nothing.
_BY_ROOT: dict[str, Family] = {name: family for family in FAMILIES for name in family.roots}


def code_of(spec: RegionSpec) -> RegionCode:
    """Return a description's code, by its form's names, or the way in which its block is called
    where that was learned.

    Raises:
        KeyError: no such form, or a learned one of another name.
    """
    form = Learned(dict(spec.way)) if spec.way else _FORMS[spec.family, spec.form]
    if (form.family, form.name) != (spec.family, spec.form):
        raise KeyError(f"the form must be {spec.family} {spec.form}, got {form.family} {form.name}")
    return RegionCode(spec, form)


def family_title(name: str) -> str | None:
    """Return a family's display name, or None if it is unknown."""
    return _TITLES.get(name)


def plan_model(root: torch.nn.Module, record: Mapping[str, Any] | None = None) -> Plan | Reason:
    """Cut a model into regions, or return why it runs as the host's.

    Args:
        record: what was learned of a model that no family describes.
    """
    cls = type(root)
    family = _family(cls)
    is_described = family is not None and bool(family.forms)
    if not is_described and record is not None and record["root"] == name_of(cls):
        family = family_of(record)
    if family is None and (owner := foreign_class(cls)) is not None:
        return of("at_normal_speed", why=owner)
    if family is None:
        return of("at_normal_speed", why=of("no_plan", model=cls.__name__))
    try:
        plan = family.roots[name_of(cls)](root)
    except _UNLIKE as error:
        told = {"model": cls.__name__, "sort": type(error).__name__, "error": error}
        return of("at_normal_speed", why=of("built_unlike", **told))
    if isinstance(plan, Reason):
        return plan
    if not plan.dispatches:
        reasons = list(dict.fromkeys(reason for _, reason in plan.outside))
        why = joined(reasons) if reasons else of("no_known_block")
        return of("at_normal_speed", why=of("nothing_can", model=cls.__name__, why=why))
    return plan


def may_be_learned(root: torch.nn.Module) -> bool:
    """Tell whether the class is the host's and described by no family."""
    family = _family(type(root))
    return (family is None or not family.forms) and foreign_class(type(root)) is None


def may_be_swapped(root: torch.nn.Module) -> bool:
    """Tell whether a pack may have swapped the class of a model that is cut here, as some do while
    their clone is loaded. A host class derived from one is its own architecture.
    """
    own, *parents = type(root).__mro__
    families = filter(None, map(_family, parents))
    return not is_known(own.__module__) and any(family.forms for family in families)


def may_be_captured(root: torch.nn.Module) -> bool:
    """Tell whether whole calls of a module may be replayed from a CUDA graph."""
    family = _family(type(root))
    return family is not None and family.may_be_captured(root)


def unread_options(root: torch.nn.Module) -> frozenset[str]:
    """Return the options that a module's forward does not read."""
    family = _family(type(root))
    return UNREAD if family is None else family.unread


def guided_together(root: torch.nn.Module) -> bool:
    """Tell whether guidance doubles the batch of a module's calls."""
    return any(family.guided_together for family in _families(root))


def empty_inputs(
    root: torch.nn.Module, settings: Mapping[str, Any], latent: tuple[int, ...]
) -> Inputs | None:
    """Return the inputs of a call on an empty latent of this shape, or None if unknown.

    Args:
        settings: the module's, as the host detected them from its file.
    """
    for family in _families(root):
        with contextlib.suppress(*_UNLIKE):
            return family.empty(root, settings, latent)
    return None


def _families(root: torch.nn.Module) -> list[Family]:
    """The family of a module's class, or of the one that its class was put in place of."""
    return [family for cls in type(root).__mro__ if (family := _family(cls)) is not None]


def _family(cls: type) -> Family | None:
    return _BY_ROOT.get(name_of(cls))
