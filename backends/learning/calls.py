"""One call of a block as plain data: the arguments by name, the results, and which tensors share
memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..errors import LearnError
from ..reasons import of
from ..torch_api.fakes import memory_of
from .values import take_apart

Named = dict[str, Any]


@lru_cache(maxsize=1024)
def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a class's forward, without the module itself."""
    return list(inspect.signature(forward).parameters.values())[1:]


def names_of(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a method's positional arguments, in order, without the module."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in _parameters(forward) if each.kind in kinds]


def by_name(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
    """Return the arguments of a call by name, with defaults for missing ones.

    Args:
        forward: of the block's class. Positional arguments without a name are `*0`, `*1`, ...
        args: those by position, without the block.
        kwargs: those by name.

    Raises:
        LearnError: it does not accept them.
    """
    try:
        bound = inspect.Signature(_parameters(forward)).bind(*args, **kwargs)
    except TypeError as error:
        raise LearnError(of("learned_takes", sort=f"call: {error}")) from error
    bound.apply_defaults()
    found: Named = {}
    for parameter in _parameters(forward):
        value = bound.arguments[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            found.update({f"*{i}": each for i, each in enumerate(value)})
        elif parameter.kind is parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[parameter.name] = value
    return found


def by_position(forward: Callable[..., Any], named: Named) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call of `by_name` as they are passed."""
    args = []
    rest = dict(named)
    for parameter in _parameters(forward):
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += [rest.pop(name) for name in list(rest) if name.startswith("*")]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            args.append(rest.pop(parameter.name))
    return args, rest


class NotedCall:
    """A call that is being made.

    Attributes:
        named: its arguments by name.
        leaves: its tensors and whole numbers.
        facts: of the call, as JSON-plain data: "arguments" (name and template of each), "leaves"
            (`noted`), "shared" (of each leaf the first one with its memory, -1 of a number), and of
            its end "results" (template), "returned" (`noted`) and "same" (of each result the leaf
            that it is, -1 of another tensor).
    """

    def __init__(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]):
        """Describe its arguments.

        Raises:
            LearnError: they cannot be described.
        """
        self.named = by_name(type(module).forward, args, kwargs)
        self.leaves: list[Any] = []
        arguments = [[n, take_apart(v, self.leaves, n)] for n, v in self.named.items()]
        self._memories = list(map(memory, self.leaves))
        self.facts: dict[str, Any] = {
            "arguments": arguments,
            "leaves": list(map(noted, self.leaves)),
            "shared": [self._memories.index(m) if m else -1 for m in self._memories],
        }

    def end(self, result: Any) -> None:
        """Describe its results.

        Raises:
            LearnError: no graph could return them.
        """
        returned: list[Any] = []
        if result is None:  # None would mean that the host must
            raise LearnError(of("learned_returns", sort="None"))
        try:
            results = take_apart(result, returned)
        except LearnError as error:
            sort = error.reason.values["sort"]
            raise LearnError(of("learned_returns", sort=sort)) from error
        if any(not isinstance(each, torch.Tensor) for each in returned):
            raise LearnError(of("learned_returns", sort="number"))
        same = [next((i for i, v in enumerate(self.leaves) if v is r), -1) for r in returned]
        memories = [memory(each) for each, at in zip(returned, same, strict=True) if at < 0]
        if len({*memories}) < len(memories) or {*memories} & {*self._memories}:
            raise LearnError(of("learned_alias"))
        self.facts.update(results=results, returned=list(map(noted, returned)), same=same)

    def has_changed(self) -> bool:
        """Tell whether an object among its arguments was replaced, or has other contents."""
        after: list[Any] = []
        arguments = [[name, take_apart(value, after, name)] for name, value in self.named.items()]
        pairs = zip(self.leaves, after, strict=False)
        return arguments != self.facts["arguments"] or any(one is not two for one, two in pairs)

    def written(self, memories: set[int]) -> list[int]:
        """Return the leaves whose memory is among these.

        Raises:
            LearnError: two of them share it.
        """
        found = [i for i, each in enumerate(self._memories) if each in memories]
        if any(self._memories.count(self._memories[i]) > 1 for i in found):
            raise LearnError(of("learned_shared"))
        return found


def noted(leaf: Any) -> Any:
    """Return the description of a leaf: dtype and shape of a tensor, a number as it is."""
    if isinstance(leaf, torch.Tensor):
        return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
    return leaf


def memory(leaf: Any) -> int:
    """Return a number that is equal for tensors that share memory; 0 for anything else."""
    return memory_of(leaf) if isinstance(leaf, torch.Tensor) else 0
