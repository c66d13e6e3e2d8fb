"""What was learned of a model, as a family like the written ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..plans.family import Family
from ..plans.plan import Dispatch, Place, Plan, dispatch_several
from ..reasons import Reason
from .blocks import ReadAttributes
from .form import Learned, serve
from .values import name_of


def family_of(record: Mapping[str, Any]) -> Family:
    """Make the family of a record's model, like the written ones."""
    forms = {key: Learned(way) for key, way in record["ways"]}
    return Family(
        title=record["root"].rpartition(":")[2],
        roots={record["root"]: partial(_cut, record, forms)},
        forms=forms,
    )


def _cut(record: Mapping[str, Any], forms: Mapping[str, Learned], root: torch.nn.Module) -> Plan:
    """Cut a model as it was learned."""
    plan = Plan(outside=[(name, reason_of(why)) for name, why in record["outside"]])
    for form in forms.values():
        plan.symbols.update(form.symbols)
    for name, cls, ways in record["blocks"]:
        block = root.get_submodule(name)
        if name_of(type(block)) == cls:
            plan.dispatches.append(_dispatch(name, block, [(forms[key], i) for key, i in ways]))
    return plan


def _dispatch(
    name: str, block: torch.nn.Module, ways: Sequence[tuple[Learned, list[Any]]]
) -> Dispatch:
    places = [
        Place(name if number == 0 else f"{name}:{number}", block, form)
        for number, (form, _) in enumerate(ways)
    ]
    forms = [form for form, _ in ways]
    read = ReadAttributes(block, {n for each in forms for n in each.way["reads"]["attributes"]})
    idle = [dict(numbers) for _, numbers in ways]
    return dispatch_several(places, partial(serve, forms, idle, read), apart=True)


def reason_of(problem: Mapping[str, Any]) -> Reason:
    """A reason that a record holds as data."""
    return Reason(problem["text"], problem["key"], problem["values"])
