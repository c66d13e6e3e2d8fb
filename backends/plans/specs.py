"""Places as plain data: each kind is described once, for its key and for a worker."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..code.replaced import describe_packs
from ..code.sources import fingerprint
from ..code.watch import Watch
from ..compilers.replacements import rewritten
from ..contract import InputSpec, RegionSpec, Symbol
from ..host_api import attention, kitchen, layers
from ..operators.live_parts import LivePart, called_live
from .describe import describe_module, named_code
from .plan import Form, Place, Plan

_HOST_STATE = layers.STATE
_PLAIN = (bool, int, float, str, list, tuple, torch.dtype, types.FunctionType)
#: Rows of what is handed on to parts that are called (`Form.handed_on`).
HANDED_ON = "handed_on"


def describe_place(
    place: Place,
    plan: Plan,
    *,
    dtype: torch.dtype,
    device: str,
    watch: Watch | None = None,
) -> RegionSpec:
    """Describe one place as a kind.

    Args:
        dtype: the compute dtype of the model; operators of the host get their weights in it.
        device: its type, as PyTorch names it.
        watch: the names of host code on which the kind depends are added.

    Raises:
        DescriptionError: the module is not plain data.
    """
    form, module = place.form, place.module
    inputs = form.inputs(module, str(dtype).removeprefix("torch."))
    named = {d for spec in inputs for d in spec.dims if isinstance(d, str)}

    def weight_dtype(owner: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
        loaded = layers.loaded_dtype(owner, name, tensor)
        return dtype if layers.is_operator(owner) or layers.is_stored(loaded) else loaded

    described = describe_module(
        module,
        reads=form.reads(module),
        dtype=weight_dtype,
        children=form.children,
        hidden=form.hidden,
    )
    through: list[Callable[..., Any]] = []
    sources = region_sources(form, described, watch, through)
    return RegionSpec(
        family=form.family,
        form=form.name,
        label=form.label(module),
        module=described,
        inputs=inputs,
        symbols=tuple(plan.symbols[name] for name in sorted(named)),
        sources=sources,
        device=device,
        layout=form.layout,
        packs=describe_packs(described, named_code(described)[0], through),
        way=dict(form.way),
    )


def describe_live(place: Place, description: RegionSpec, live: LivePart) -> RegionSpec:
    """Describe a place some of whose parts are called when its graph runs.

    Args:
        description: of its kind, without any replacement.

    Raises:
        DescriptionError: the kind has no such part.
    """
    form = place.form
    described = called_live(description.module, place.module, live, layout=form.layout)
    through: list[Callable[..., Any]] = []
    sources = region_sources(form, described, through=through)
    inputs, symbols = _handed_on(form.handed_on(place.module), description, live)
    return replace(
        description,
        label=f"{description.label} (parts called)",
        module=described,
        inputs=inputs,
        symbols=symbols,
        sources=sources,
        packs=describe_packs(described, named_code(described)[0], through),
    )


def _handed_on(
    readers: Mapping[str, tuple[str, ...]], description: RegionSpec, live: LivePart
) -> tuple[tuple[InputSpec, ...], tuple[Symbol, ...]]:
    """The inputs and symbols of a kind some of whose parts are called: an input that only these
    read may have other rows, such as a further text for each image.
    """
    free = [name for name, parts in readers.items() if parts and set(parts) <= set(live.parts)]
    if not free:
        return description.inputs, description.symbols
    [rows] = (each for each in description.symbols if each.name == description.inputs[0].dims[0])
    handed = replace(rows, name=HANDED_ON, example=rows.example + 1)
    inputs = tuple(
        replace(spec, dims=(HANDED_ON, *spec.dims[1:])) if spec.name in free else spec
        for spec in description.inputs
    )
    return inputs, tuple(sorted((*description.symbols, handed), key=lambda each: each.name))


def region_sources(
    form: Form,
    described: dict[str, Any],
    watch: Watch | None = None,
    through: list[Callable[..., Any]] | None = None,
) -> dict[str, str]:
    """Hash all code of a region: the form's reference, the module tree's, rewrites; and name the
    version of the host's kernels that it calls.

    Args:
        described: the module tree (`describe.describe_module`).
        watch: the names on which this depends are added.
        through: the functions are added.
    """
    classes, functions = named_code(described)
    reference: Callable[..., Any] = type(form).reference
    live = attention.replaceable() if form.live_attention else None
    functions = [reference, *form.code(), *rewritten(form.layout), *functions]
    found = fingerprint(functions, classes, watch, through, live)
    if any(name.startswith(kitchen.PACKAGE) for name in found):
        found[f"{kitchen.PACKAGE}:version"] = kitchen.facts()
    return found


def quick_signature(place: Place) -> tuple[Any, ...]:
    """Return a signature of a place's kind, at a fraction of a description's cost.

    Places with equal signatures have equal descriptions: it holds the classes, the plain attributes
    and the parameters' meta of the whole region.
    """
    module, kept = place.module, place.form.children
    parts: list[Any] = [place.form.name, place.widens]
    pending = [("", module)]
    while pending:
        path, part = pending.pop()
        parts.append((path, type(part)))
        parts += [
            (name, _mark(value))
            for name, value in part.__dict__.items()
            if name not in _HOST_STATE
            and name not in layers.FORWARDS  # another node's, not part of the module
            and (name[0] != "_" or isinstance(value, _PLAIN))
            and (path or name not in place.form.hidden)
        ]
        parts += [
            (name, None if p is None else (type(p), p.shape, p.dtype))
            for table in (part._parameters, part._buffers)
            for name, p in table.items()
        ]
        pending += [
            (name, child)
            for name, child in part._modules.items()
            if child is not None and (path or kept is None or name in kept)
        ]
    return tuple(parts)


def _mark(value: Any) -> Any:
    """A plain attribute's value; of anything else the class."""
    if isinstance(value, (list, tuple)):
        return repr(value)
    return value if isinstance(value, _PLAIN) else type(value)
