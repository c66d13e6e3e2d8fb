"""Modules as plain data, and weightless twins made from it.

A description names classes, the plain attributes that their code reads, and the meta of parameters.
A twin is the same module tree, rebuilt from it without running any constructor, so the worker that
exports it needs neither the checkpoint nor the constructor's arguments.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from ..code.packs import foreign_class, pack_of
from ..errors import DescriptionError
from ..host_api import gguf, layers
from ..kinds.module_tree import walk
from ..operators import attention_layer, host_layer, live_parts
from ..reasons import joined, of

_WEIGHTS = ("weight", "bias")
#: What stands in a twin for parts that are the host's, by their class in a description.
_LEFT: dict[str, Callable[..., torch.nn.Module]] = {
    attention_layer.CLASS: attention_layer.AttentionLayer,
    **live_parts.STAND_INS,
}
_TORCH_STATE = frozenset(torch.nn.Module().__dict__) | {"training"}


def describe_module(
    module: torch.nn.Module,
    *,
    reads: Callable[[type], Collection[str]],
    dtype: Callable[[torch.nn.Module, str, torch.Tensor], torch.dtype],
    children: Collection[str] | None = None,
    hidden: Collection[str] = (),
    path: str = "",
) -> dict[str, Any]:
    """Describe a module tree as JSON-plain data.

    Args:
        module: the live module; its weights are not read, only their shapes.
        reads: for a class, the attribute names that its code reads (`sources.attributes_read`).
        dtype: the dtype in which a parameter reaches its operator (module, name, tensor).
        children: names of the direct children to keep; None keeps all.
        hidden: attributes to leave out: of `module` itself, or by their path below it.
        path: where `module` is in the tree; a product in it that cannot be described is left to the
            host (`host_layer`).

    Raises:
        DescriptionError: a class cannot be imported by name, or an attribute that its code reads is
            not plain data.
    """
    cls = gguf.host_class(module)
    where = f"{cls.__module__}:{cls.__qualname__}"
    owner = foreign_class(cls)
    if "<locals>" in cls.__qualname__:
        words = of("class_at_run_time", name=where)
        raise DescriptionError(words if owner is None else joined([words, owner]))
    if owner is not None and pack_of(cls.__module__):  # a worker has the host's code only
        raise DescriptionError(owner)
    wanted = reads(cls)
    # A weight that the host's operators do without is a plain None or no parameter, as its way of
    # loading has it; a twin gets it as the former.
    absent = {
        name for name in _WEIGHTS if layers.is_operator(cls) and getattr(module, name, None) is None
    }
    attributes = {}
    for name, value in module.__dict__.items():
        if name in _TORCH_STATE or name in layers.STATE or name in hidden or name not in wanted:
            continue
        if name in absent:
            continue
        if name in layers.FORWARDS:
            continue  # another node's, or the class's bound by the host: not part of the module
        if getattr(value, "__func__", None) is getattr(cls, name, module):
            continue  # another method of the class
        try:
            attributes[name] = _plain(value)
        except TypeError:
            raise DescriptionError(
                of("attribute_not_plain", name=name, where=where, sort=type(value).__name__)
            ) from None
    buffers = {n: b for n, b in module._buffers.items() if b is not None and n not in hidden}
    if buffers and (layers.is_operator(cls) or not set(buffers) <= set(wanted)):
        raise DescriptionError(of("has_buffers", where=where))
    parameters: dict[str, dict[str, Any] | None] = {}
    for name, tensor in (*module._parameters.items(), *buffers.items()):
        if name in absent:
            continue
        if tensor is None:
            parameters[name] = None
            continue
        if type(tensor) not in (torch.nn.Parameter, torch.Tensor):
            raise DescriptionError(
                of("tensor_not_plain", where=where, name=name, sort=type(tensor).__name__)
            )
        final = dtype(module, name, tensor)
        parameters[name] = {"shape": list(tensor.shape), "dtype": str(final).removeprefix("torch.")}
    return {
        "class": where,
        "attributes": dict(sorted(attributes.items())),
        "parameters": parameters,
        "modules": [
            [name, _child(f"{path}.{name}".lstrip("."), child, reads, dtype, _below(name, hidden))]
            for name, child in module._modules.items()
            if child is not None and (children is None or name in children)
        ],
    }


def _below(name: str, hidden: Collection[str]) -> tuple[str, ...]:
    return tuple(path.removeprefix(f"{name}.") for path in hidden if path.startswith(f"{name}."))


def _child(
    path: str, module: torch.nn.Module, reads: Any, dtype: Any, hidden: Collection[str]
) -> dict[str, Any]:
    if (attends := attention_layer.describe(path, module)) is not None:
        return attends
    left = host_layer.describe(path, module)
    if left is not None and layers.multiplies_as_stored(module):
        return left
    try:
        return describe_module(module, reads=reads, dtype=dtype, hidden=hidden, path=path)
    except DescriptionError:
        if left is None:
            raise
        return left


def make_twin(
    description: dict[str, Any], parameter: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
) -> torch.nn.Module:
    """Rebuild a described module tree; `parameter` makes each tensor from shape and dtype.

    Raises:
        DescriptionError: a class cannot be imported here.
    """
    if (left := _LEFT.get(description["class"])) is not None:
        layer = left(**description["attributes"])
        _add_parameters(layer, description["parameters"], parameter)
        return layer
    cls = import_named(description["class"])
    twin: torch.nn.Module = cls.__new__(cls)
    torch.nn.Module.__init__(twin)
    if layers.is_operator(cls):
        layers.make_final(twin)
    for name, value in description["attributes"].items():
        setattr(twin, name, _restore(value))
    _add_parameters(twin, description["parameters"], parameter)
    if layers.is_operator(cls):
        for name in _WEIGHTS:
            if name not in twin._parameters:
                twin.__dict__.setdefault(name, None)
    for name, child in description["modules"]:
        twin.add_module(name, make_twin(child, parameter))
    twin.eval()
    return twin


def _add_parameters(
    twin: torch.nn.Module,
    described: dict[str, Any],
    parameter: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
) -> None:
    for name, meta in described.items():
        if meta is None:
            twin.register_parameter(name, None)
            continue
        tensor = parameter(tuple(meta["shape"]), getattr(torch, meta["dtype"]))
        twin.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def import_named(name: str) -> Any:
    """Return the class or function that a description names as "module:qualified.name".

    Raises:
        DescriptionError: it cannot be imported here.
    """
    module_name, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise DescriptionError(of("not_importable", name=name, error=error)) from error
    return found


def named_code(description: dict[str, Any]) -> tuple[list[type], list[Callable[..., Any]]]:
    """Import every class, and every function kept as an attribute, that a described tree names."""
    classes: set[str] = set()
    functions: set[str] = set()
    for _, module in walk(description):
        if module["class"] not in _LEFT:
            classes.add(module["class"])
            functions.update(_functions(module["attributes"].values()))
    return (
        [import_named(name) for name in sorted(classes)],
        [import_named(name) for name in sorted(functions)],
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(v) for v in value]}
    if isinstance(value, types.FunctionType) and value.__closure__ is None:
        name = f"{value.__module__}:{value.__qualname__}"
        if _is_named(value, name):
            return {"function": name}
    raise TypeError(type(value).__name__)


def _restore(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    if tag == "dtype":
        return getattr(torch, content)
    if tag == "function":
        return import_named(content)
    items = [_restore(v) for v in content]
    return tuple(items) if tag == "tuple" else items


def _is_named(function: types.FunctionType, name: str) -> bool:
    try:
        return import_named(name) is function
    except DescriptionError:
        return False


def _functions(values: Collection[Any]) -> Iterator[str]:
    """The functions among described attribute values."""
    for value in values:
        if isinstance(value, dict):
            [(tag, content)] = value.items()
            if tag == "function":
                yield content
            elif tag != "dtype":
                yield from _functions(content)
