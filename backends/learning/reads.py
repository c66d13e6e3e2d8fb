"""What a block's code reads in a call: all that PyTorch's tracer (Dynamo) guards, as a trace
depends on it. What is neither compared at each call nor in the key is refused with a reason.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ..code.bytecode import codes, compares_identity
from ..code.packs import OWN
from ..code.purity import code_objection, is_pure
from ..code.sources import fingerprint, is_outside
from ..code.watch import Watch
from ..errors import LearnError
from ..host_api import attention, layers
from ..reasons import of
from ..torch_api.guarding import is_taken_whole, trace
from .blocks import FETCHING, all_read, kept_functions
from .calls import NotedCall, by_position, names_of
from .values import classes_of

#: A step from something to its class.
_TYPE = "<class>"
#: Guards that do not concern a block: torch's own of hooks, and that two tensors are two.
_OF_TORCH = frozenset(("EMPTY_NN_MODULE_HOOKS_DICT", "DUPLICATE_INPUT"))
_MODULE = frozenset(torch.nn.Module().__dict__) - {"training"}
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, Enum, type(None))
_CODE = (
    *(types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, property, staticmethod, classmethod),
)
#: Methods of tensors that depend on one's layout in memory or on what made it.
_LAYOUT = frozenset(
    (
        *("is_contiguous", "stride", "storage_offset", "data_ptr", "untyped_storage", "as_strided"),
        *("is_leaf", "requires_grad", "is_inference", "is_set_to", "_base", "_version"),
    )
)
#: Functions that tell which object something is, or how torch is set; the latter by what their
#: names begin with, but for some that ask of tensors, or are false at each call of the host's.
_SETTINGS = ("id", "hash", "dir")
_ASKING = ("is_", "are_", "get_")
_HARMLESS = frozenset(
    ("is_tensor", "is_floating_point", "is_complex", "is_same_size", "is_compiling")
)
#: What a class or a function is called, which no guard tells, hooks, which one says of those of
#: each layer that is called, and what is another way where code is traced.
_UNTOLD = frozenset(
    (
        *("is_compiling", "__name__", "__qualname__", "__module__", "__doc__"),
        *(_MODULE - {"_modules", "_parameters", "_buffers"}),
    )
)


@dataclass
class BlockReads:
    """What one call of a block reads.

    Attributes:
        leaves: of its arguments, whole numbers among them.
        options: names of the step's.
        attributes: names of its layers' attributes that no code names.
    """

    leaves: set[int] = field(default_factory=set)
    options: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)

    def counting(self, call: NotedCall, options: Mapping[str, Any]) -> Any:
        """Return what counts of a call: equal for calls that a trace cannot tell apart."""
        facts = {**call.facts, "leaves": list(enumerate(call.facts["leaves"]))}
        facts["leaves"] = [
            each for i, each in facts["leaves"] if i in self.leaves or isinstance(each, list)
        ]
        return repr((facts, [(n, v if n in self.options else 0) for n, v in options.items()]))


def read_by(block: torch.nn.Module, call: NotedCall) -> BlockReads:
    """Return what a block's code reads in a call.

    Args:
        block: on fakes.
        call: of the block.

    Raises:
        LearnError: it reads what may change unseen, or cannot be traced.
    """
    forward = type(block).forward
    args, kwargs = by_position(forward, call.named)
    try:
        guards, traced = trace(forward, block, args, kwargs)
    except Exception as error:  # of the host's code, or of torch
        line = next(iter(str(error).splitlines()), "")[:160]
        raise LearnError(of("learned_untraced", sort=type(error).__name__, error=line)) from error
    watch = _check_code(block, call, traced)
    by_text = any(guard.name.strip().endswith("['getattr']") for guard in guards)
    if by_text:  # which no guard covers for classes
        for part in block.modules():
            _check_class(type(part), watch)
    known, arguments = BlockReads(), dict(call.facts["arguments"])
    names = names_of(forward)
    names = [*names, *(f"*{i}" for i in range(len(args) - len(names)))]
    for guard in guards:
        if guard.create_fn_name() in _OF_TORCH or (path := _path(guard.name)) is None:
            continue
        scope, name, steps = path
        absent = getattr(guard.create_fn, "keywords", {}).get("attr")
        if scope == "G":
            value = _check_global(name, steps, watch)
            if by_text and isinstance(value, type):
                _check_class(value, watch)
        elif name == "block":
            if (seen := _looks_through(block, steps, guard.create_fn_name())) is not None:
                raise LearnError(of("learned_reads", name=seen))
            _of_block(block, steps, absent, known, watch)
        elif name == "forward":
            _check(forward, steps, forward.__name__, watch)
        elif steps:
            at = names[steps[0]] if name == "args" else steps[0]
            _of_argument(call.named[at], arguments[at], steps[1:], at, known, watch)
    seen = {*all_read(block), *layers.STATE, *layers.FORWARDS}
    known.attributes = {n for n in known.attributes - seen if n[:2] != "__"}
    return known


def _path(name: str) -> tuple[str, Any, list[Any]] | None:
    """A guard's name as its scope, the name there, and the steps from it."""
    try:
        node = ast.parse(name.strip(), mode="eval").body
    except SyntaxError:
        return None
    steps: list[Any] = []
    while True:
        if isinstance(node, ast.Attribute):
            steps.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if isinstance(node.value, ast.Name) and node.value.id in ("L", "G"):
                return node.value.id, key, steps[::-1]
            steps.append(key)
            node = node.value
        elif isinstance(node, ast.Call) and node.args:
            if isinstance(node.func, ast.Name) and node.func.id == "type":
                steps.append(_TYPE)
            node = node.args[0]
        else:
            return None


def _part_of(part: torch.nn.Module, steps: list[Any]) -> tuple[torch.nn.Module | None, list[Any]]:
    """The layer that steps from a block lead to, and the remaining steps."""
    while steps[:1] == ["_modules"] and len(steps) > 1 and steps[1] in part._modules:
        child = part._modules[steps[1]]
        if child is None:
            return None, []
        part, steps = child, steps[2:]
    return part, steps


def _looks_through(block: torch.nn.Module, steps: list[Any], kind: str) -> Any:
    """What a guard says of a layer beside attributes: all its hooks, buffers or parameters, or a
    mark on one.
    """
    part, steps = _part_of(block, steps)
    if part is None or not steps or steps[0] not in _MODULE - {"_modules"}:
        return None
    if len(steps) == 1:
        return None if kind == "TYPE_MATCH" else steps[0]
    mark = steps[2] if len(steps) > 2 and isinstance(steps[2], str) else _TYPE
    return None if mark == _TYPE or hasattr(torch.Tensor, mark) else mark


def _of_block(
    block: torch.nn.Module, steps: list[Any], absent: Any, known: BlockReads, watch: Watch
) -> None:
    part, steps = _part_of(block, steps)
    if part is None:
        return
    if not steps:
        known.attributes.update((absent,) if isinstance(absent, str) else ())
    elif steps[0] == _TYPE:
        if not (layers.is_operator(part) and any(name in layers.STATE for name in steps)):
            _check(type(part), steps[1:], type(part).__qualname__, watch)
    elif steps[0] not in _MODULE:
        known.attributes.add(steps[0])


def _of_argument(
    value: Any, template: Any, steps: Sequence[Any], name: str, known: BlockReads, watch: Watch
) -> None:
    for i, step in enumerate(steps):
        tag, *content = template
        if tag == "options":
            known.options.add(step)
            return
        is_own = isinstance(value, torch.Tensor) and step != _TYPE
        if is_own and not hasattr(torch.Tensor, str(step)):
            raise LearnError(of("learned_reads", name=step))
        if tag in ("leaf", "plain", "dtype"):
            break
        is_object = tag in ("fields", "attributes")
        if step == _TYPE:
            parts = dict(content[-1]) if is_object else {}
            if not parts.keys() & set(map(str, steps[i:])):
                _check(type(value), steps[i + 1 :], name, watch)
            return
        if tag == "choice":
            return
        inner = dict(enumerate(content[0])) if tag in ("list", "tuple") else dict(content[-1])
        if step not in inner:
            if is_object and isinstance(step, str) and not hasattr(type(value), step):
                raise LearnError(of("learned_reads", name=step))
            return
        template = inner[step]
        value = getattr(value, step) if tag in ("fields", "attributes") else value[step]
    if template[0] == "leaf":
        known.leaves.add(template[1])


def _check_global(name: str, steps: Sequence[Any], watch: Watch) -> Any:
    if name.startswith("__import_"):
        module = name.removeprefix("__import_").replace("_dot_", ".")
        return _check(sys.modules.get(module), steps, name, watch)
    return _check(builtins, steps, name, watch) if name.startswith("__builtins_dict") else None


def _check_class(cls: type, watch: Watch) -> None:
    """Check that all of a class is in the key, if its attributes may be read by a computed name."""
    for owner in cls.__mro__:
        home = str(owner.__module__)
        if not (is_outside(home) or home.startswith((*FETCHING, OWN))):
            for name in vars(owner):
                if name[:2] != "__":
                    _check(owner, [name], name, watch)


def _check(value: Any, steps: Sequence[Any], name: str, watch: Watch) -> Any:
    """Check that what a trace found by these steps is what its code names, at each call."""
    holder: Any = None
    for step in steps:
        holder = holder if isinstance(value, types.MappingProxyType) else value
        home = getattr(
            value, "__name__" if isinstance(value, types.ModuleType) else "__module__", ""
        )
        if str(home or "").startswith((*FETCHING, OWN)):
            return None
        try:
            value = getattr(value, step)
        except (AttributeError, TypeError):
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        name = str(step) if isinstance(step, str) and not step.startswith("__") else name
        if isinstance(value, type) and _asks(value):
            raise LearnError(of("learned_reads", name=name))
        if is_outside(str(home)):  # torch's own state does not matter
            if _is_setting(value, str(home)) or not is_pure(str(home)):
                raise LearnError(of("learned_reads", name=name))
            continue
        if not (_is_fixed(value) or isinstance(value, (types.CellType, types.MappingProxyType))):
            raise LearnError(of("learned_reads", name=name))
        if isinstance(step, str) and step[:2] != "__" and not _is_known(holder, step, value, watch):
            raise LearnError(of("learned_reads", name=name))
    return value


def _is_setting(value: Any, home: str) -> bool:
    """Tell whether something is a setting of torch or of Python."""
    if not callable(value):
        return isinstance(value, (bool, int, str)) and home.startswith("torch")
    name, of_torch = getattr(value, "__name__", ""), home.startswith("torch")
    asks = of_torch and name.startswith(_ASKING) and name not in _HARMLESS
    return not isinstance(value, type) and (asks or name in _SETTINGS)


def _asks(cls: type) -> bool:
    """Tell whether a class decides by code what is an instance or subclass of it."""
    meta = type(cls)
    asks = [getattr(meta, name) for name in ("__instancecheck__", "__subclasscheck__")]
    plain = [getattr(type, name) for name in ("__instancecheck__", "__subclasscheck__")]
    return asks != plain and not is_outside(cls.__module__)


def _is_known(holder: Any, name: str, value: Any, watch: Watch) -> bool:
    """Tell whether a change of a plain value would be noticed."""
    if isinstance(holder, types.FunctionType):
        return False
    if not isinstance(value, (*_PLAIN, tuple)):
        return True
    owner = vars(holder) if isinstance(holder, types.ModuleType) else holder
    return not isinstance(owner, (dict, type)) or watch.knows(owner, name)


def _is_fixed(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    known = isinstance(value, (*_PLAIN, *_CODE))
    return known or (callable(value) and is_outside(type(value).__module__))


def _check_code(block: torch.nn.Module, call: NotedCall, traced: Sequence[types.CodeType]) -> Watch:
    """Check that all code that ran is in the key; returns what else is, by name."""
    watch = Watch()
    through: list[Callable[..., Any]] = []
    classes = {type(part) for part in block.modules()}
    functions: list[Any] = [*kept_functions(block)]
    given = classes_of(call.facts["arguments"])
    functions += given
    fingerprint(functions, classes, watch, through, attention.replaceable())
    choices = tuple(f"{cls.__qualname__}." for cls in given if issubclass(cls, Enum))
    for function in through:  # of an enum class they run unseen
        problem = function.__qualname__.startswith(choices) and code_objection(function)
        if problem:
            raise LearnError(of("learned_code", name=function.__qualname__, why=problem))
        if is_taken_whole(function):
            raise LearnError(of("learned_hidden", name=function.__qualname__))
    known = {id(inner) for each in through for inner in codes(each.__code__)}
    passed = _passed_files()
    for code in traced:
        if code.co_filename in passed:
            continue
        if id(code) not in known and code.co_name not in layers.NOT_TRACED:
            raise LearnError(of("learned_hidden", name=code.co_name))
        if read := (_LAYOUT | _UNTOLD).intersection(code.co_names):
            raise LearnError(of("learned_reads", name=min(read)))
        if compares_identity(code):
            raise LearnError(of("learned_identity", name=code.co_name))
    return watch


def _passed_files() -> set[str]:
    """Of modules whose code does not concern a block; each may have more than one name."""
    return {
        file
        for name, module in list(sys.modules.items())
        if (is_outside(name) or name.startswith((*FETCHING, OWN)))
        and isinstance(file := getattr(module, "__file__", None), str)
    }
