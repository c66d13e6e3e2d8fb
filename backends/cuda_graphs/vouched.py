"""Other nodes' attention of which only a user says that it does the same at each step.

It is captured on that word, but for one thing: memory that is allocated within a capture must be
freed within it (`captured_call`), so one that keeps a tensor of a step could end the process. So
each is watched for one step, of which nothing is captured, before any that is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ..code.steady import Same, identity, steady
from ..host_api import options
from ..reasons import Reason, of
from ..torch_api.memory import Memory

#: In so many steps of a run one is met that was not watched; nodes that make another for each step
#: have nothing played back.
MAX_WATCHED = 4


class Attention(NamedTuple):
    """What becomes of another node's attention in one call.

    Attributes:
        function: it, where it may be captured on the user's word.
        problem: why it is not, although the user says so.
        watch: within which the call is to be made, of which nothing may be captured then.
    """

    function: Any = None
    problem: Reason | None = None
    watch: AbstractContextManager[None] | None = None


#: There is none, or its code tells enough, or the user says nothing of it.
NONE = Attention()


class Vouched:
    """Which of them may be captured in the calls of one root module."""

    def __init__(self, is_on: Callable[[], bool]) -> None:
        """Set up.

        Args:
            is_on: whether the user says so, from the next run on.
        """
        self._ask = is_on
        self._is_on = False
        self._left = 0
        #: What was seen of those that were watched.
        self._seen: dict[Same, Reason | None] = {}

    def begin_run(self) -> bool:
        """Ask for the user's word anew; tells whether it is another one than before."""
        before, self._is_on = self._is_on, self._ask()
        self._left = MAX_WATCHED
        self._seen = {name: seen for name, seen in self._seen.items() if name.lives}
        return self._is_on is not before

    def look(self, values: Sequence[Any]) -> Attention:
        """Tell what becomes of the attention that a node put into a call.

        Args:
            values: the call's arguments.
        """
        function = options.attention_of(values) if self._is_on else None
        if function is None or steady(function).why_not is None:
            return NONE
        name = identity(function)
        if name is None:
            return NONE
        if name in self._seen:
            problem = self._seen[name]
            return Attention(function) if problem is None else Attention(problem=problem)
        if not self._left:
            return Attention(problem=of("override_anew"))
        self._left -= 1
        Memory(torch.empty(0))  # what it may raise is ours, so not within the host's call
        return Attention(watch=self._watch(name, function, values))

    @contextlib.contextmanager
    def _watch(self, name: Same, function: Any, values: Sequence[Any]) -> Iterator[None]:
        """Note, once a call is made, whether a tensor is left that an attention got or made."""
        seen: set[Memory] = set()

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.update(_memory_of(args[1:4]))  # query, key and value; masks are the caller's
            with _Made(seen):
                result = function(*args, **kwargs)
            seen.update(_memory_of([result]) - _memory_of((*args, *kwargs.values())))
            return result

        with options.attending_by(values, watched):
            yield
        left = any(memory.is_used for memory in seen)
        self._seen[name] = of("override_keeps") if left else None


class _Made(TorchFunctionMode):
    """Notes the memory of all tensors that are made in this thread meanwhile."""

    def __init__(self, seen: set[Memory]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # A view of what was there before is nothing new.
        self._seen |= _memory_of([result]) - _memory_of((*args, *kwargs.values()))
        return result


def _memory_of(values: Iterable[Any]) -> set[Memory]:
    """The memory of the plain tensors among values, and in lists and tuples of them."""
    found: set[Memory] = set()
    for value in values:
        if isinstance(value, (list, tuple)):
            found |= _memory_of(value)
        elif type(value) in _PLAIN and value.layout is torch.strided:
            found.add(Memory(value))
    return found


_PLAIN = (torch.Tensor, torch.nn.Parameter)
