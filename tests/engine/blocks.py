"""Single calls of a model's blocks, as the host made them: what its own code and ours do with what
they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_backends.plans import binding

from .lab import TOLERANCE, relative


class BlockCall(NamedTuple):
    """A block, and the arguments of its first call."""

    block: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def made(self, forward: Callable[..., Any]) -> Made:
        """Make it over copies."""
        args, kwargs = copied((self.args, self.kwargs))
        given = list(tensors((args, kwargs)))
        before = [tensor.clone() for tensor in given]
        result = forward(*args, **kwargs)
        return Made(given, before, list(tensors(result)))


class Made(NamedTuple):
    """What one call was given, what that was before, and what came back."""

    given: list[torch.Tensor]
    before: list[torch.Tensor]
    results: list[torch.Tensor]

    def written(self) -> set[int]:
        """Which of its inputs it wrote into."""
        pairs = enumerate(zip(self.given, self.before, strict=True))
        return {i for i, (now, before) in pairs if not torch.equal(now, before)}

    def same(self) -> list[int | None]:
        """Which input each result is."""
        return [_index(self.given, lambda g, r=result: g is r) for result in self.results]

    def sharing(self) -> list[int | None]:
        """The memory of which input each result lies in."""
        return [
            _index(self.given, lambda g, r=result: _memory(g) == _memory(r))
            for result in self.results
        ]


def block_calls(blocks: list[torch.nn.Module], run: Callable[[], Any]) -> list[BlockCall]:
    """Run a model of the host's; returns the first call of each of its blocks that it made."""
    found: dict[int, BlockCall] = {}

    def note(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.setdefault(id(block), BlockCall(block, *copied((args, kwargs))))

    with ExitStack() as hooks:
        for block in blocks:
            handle = block.register_forward_pre_hook(note, with_kwargs=True)
            hooks.callback(handle.remove)
        run()
    return list(found.values())


def check_blocks(scope: Any, run_host: Callable[[], Any]) -> set[str]:
    """Each block of a compiled model leaves its inputs as the host's block does, gives the same
    objects back, and computes the same; returns the classes of those that write into their inputs.

    Args:
        run_host: makes calls of the model without us.
    """
    forwards = {id(module): forward for module, _, forward in scope.forwards.now.installed}
    blocks = [dispatch.module for dispatch in scope.plan.dispatches]
    assert blocks and all(id(block) in forwards for block in blocks)
    calls = block_calls(blocks, run_host)
    assert len(calls) == len(blocks)
    writing = set()
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding, "_is_idle", lambda *_: pytest.fail("its arguments are all known"))
        scope.begin_run()
        scope._bound.weights.begin_step()
        for call in calls:
            theirs = call.made(partial(type(call.block).forward, call.block))
            before = scope.account.calls
            ours = call.made(forwards[id(call.block)])
            assert scope.account.calls > before, "a graph served it"
            assert ours.written() == theirs.written()
            assert ours.same() == theirs.same() and ours.sharing() == theirs.sharing()
            for one, other in zip(ours.given, theirs.given, strict=True):
                assert one.stride() == other.stride()
            pairs = [*zip(ours.results, theirs.results, strict=True)]
            pairs += [(ours.given[i], theirs.given[i]) for i in theirs.written()]
            assert max(relative(one, other) for one, other in pairs) <= TOLERANCE
            if theirs.written():
                writing.add(type(call.block).__name__)
        scope.end_run()
    return writing


def copied(value: Any) -> Any:
    """A copy of tensors and containers, of any depth."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {k: copied(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(v) for v in value)
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors within something."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def _index(tensors: list[torch.Tensor], is_it: Callable[[torch.Tensor], bool]) -> int | None:
    return next((i for i, tensor in enumerate(tensors) if is_it(tensor)), None)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
