"""Which model family a module of the host is of; the only list of families."""

from __future__ import annotations

import torch

from ..host_api.options import UNREAD
from ..kinds.packs import foreign_class, is_known
from . import adapter, control, flux, lumina, unet, vae, wan
from .family import Family
from .plan import Form, Plan

FAMILIES = (
    unet.FAMILY,
    control.FAMILY,
    adapter.FAMILY,
    flux.FAMILY,
    lumina.FAMILY,
    vae.FAMILY,
    wan.FAMILY,
)

_FORMS: dict[tuple[str, str], Form] = {
    (form.family, form.name): form for family in FAMILIES for form in family.forms.values()
}
#: By the full name of a root's class: to ask imports nothing.
_BY_ROOT: dict[str, Family] = {name: family for family in FAMILIES for name in family.roots}


def form_of(family: str, name: str) -> Form:
    """Return a form by the names that a description carries."""
    return _FORMS[family, name]


def plan_model(root: torch.nn.Module) -> Plan | str:
    """Cut a model of the host into regions, or say in a line why it stays as it is."""
    cls = type(root)
    family = _family(cls)
    if family is None and (owner := foreign_class(cls)) is not None:
        return f"{owner}: runs as without this node"
    if family is None:
        return f"no region plan for {cls.__name__} yet: runs as without this node"
    plan = family.roots[_full_name(cls)](root)
    if not plan.dispatches:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in plan.outside)) or "no known block"
        return f"nothing of this {cls.__name__} can be compiled ({reasons}): runs as without it"
    return plan


def may_be_swapped(root: torch.nn.Module) -> bool:
    """Tell whether a model's class may have been put in place of one that is known here: packs do
    so for as long as their clone of the model is loaded. A class of the host that derives from a
    known one is an architecture of its own.
    """
    own, *parents = type(root).__mro__
    return not is_known(own.__module__) and any(_family(parent) for parent in parents)


def may_be_captured(root: torch.nn.Module) -> bool:
    """Tell whether whole calls of a module may be replayed from a CUDA graph."""
    family = _family(type(root))
    return family is not None and family.may_be_captured(root)


def unread_options(root: torch.nn.Module) -> frozenset[str]:
    """Return the names of the options that a module's own forward does not read."""
    family = _family(type(root))
    return UNREAD if family is None else family.unread


def special_pays(root: torch.nn.Module) -> bool:
    """Tell whether graphs of one size pay for a module, also while its class is swapped."""
    known = (family for cls in type(root).__mro__ if (family := _family(cls)) is not None)
    return any(family.special_pays for family in known)


def _family(cls: type) -> Family | None:
    return _BY_ROOT.get(_full_name(cls))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
