"""A whole step by what was learned, beside the host's own.

Each block's graph is compared with the host's block. That says nothing of what the model's own code
does around them. So one step is made twice, for each structure of a call and each set of graphs,
before any result of theirs is given on. What is given on of that step is the host's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..cuda_graphs.signatures import FixedCallError, read_result
from ..device import gpu
from ..host_api import layers
from ..host_api.execution import is_interrupt
from ..kinds.tolerance import RELATIVE_L2, difference, nudged, relative_l2, tells_nothing
from ..learning.standing import Standing
from ..reasons import Reason, of
from .trust import NUDGE

logger = logging.getLogger(__name__)

#: From here on a whole number is likelier a size than a choice.
_FEW = 8
#: Makes a call with these arguments.
Make = Callable[[Sequence[Any], Mapping[str, Any]], Any]


class Proven(NamedTuple):
    """A step that was made twice.

    Attributes:
        result: the host's.
        is_good: whether the other one equals it; None where that says nothing.
        problem: why it does not.
    """

    result: Any
    is_good: bool | None
    problem: Reason | None = None


def structure_of_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], unread: frozenset[str]
) -> Hashable:
    """Return what is equal for calls that differ in sizes and numbers alone. A side of one element
    and a small whole number are told from others: code often goes by them.

    Args:
        unread: options that the model's forward does not read.
    """
    positional = tuple(_form(value, unread) for value in args)
    return positional, tuple((name, _form(value, unread)) for name, value in kwargs.items())


def _form(value: Any, unread: frozenset[str], within: bool = False) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device.type, tuple(size == 1 for size in value.shape)
    if type(value) is dict:
        return frozenset(
            (name, _form(each, unread, True))
            for name, each in value.items()
            if name not in unread and not (isinstance(each, (dict, list)) and not each)
        )
    if isinstance(value, (list, tuple)):
        forms = [_form(each, unread, within) for each in value]
        return frozenset(forms) if within else tuple(forms)
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int and abs(value) < _FEW:
        return value
    return type(value).__qualname__


def prove(
    root: torch.nn.Module,
    device: torch.device,
    ours: Make,
    theirs: Make,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_quantised: bool,
) -> Proven:
    """Make a step by graphs, and as the host does.

    Too little memory for both tells nothing.

    Args:
        root: the module that is called.
        device: where it runs.
        ours, theirs: make it so.
        args, kwargs: of the call; the host may use them up.
        is_quantised: whether layers that graphs call may round what they multiply.

    Raises:
        Whatever the host's own step raises, and its interrupt.
    """
    trial, problem = _tried(root, device, ours, args, kwargs)
    result = theirs(args, kwargs)
    if trial is None or problem is not None:
        return Proven(result, None if problem is None else False, problem)
    try:
        return Proven(result, *_judged(trial, result, theirs, is_quantised))
    except Exception as error:
        if is_interrupt(error):
            raise
        if not isinstance(error, torch.OutOfMemoryError):
            logger.warning("A whole step could not be compared", exc_info=error)
        return Proven(result, None)


class _Trial(NamedTuple):
    """A step that was made by graphs.

    Attributes:
        root: the module that was called.
        start: how it stood before.
        inputs: a copy of the arguments.
        results: what it gave.
    """

    root: torch.nn.Module
    start: _Start
    inputs: Any
    results: list[torch.Tensor]


def _tried(
    root: torch.nn.Module,
    device: torch.device,
    ours: Make,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[_Trial | None, Reason | None]:
    """Make a step by graphs; None where there was too little memory, or why it must not be given
    on. Only the host's interrupt passes: its own step may get through where this one does not.
    """
    start = None
    try:
        inputs = _copied((args, kwargs))
        start = _Start(root, device)
        with start.again():
            trial = _Trial(root, start, inputs, read_result(ours(*_copied(inputs))).tensors)
    except FixedCallError as error:
        return None, error.reason
    except Exception as error:
        if is_interrupt(error):
            raise
        if not isinstance(error, torch.OutOfMemoryError):
            line = next(iter(str(error).splitlines()), "")[:160]
            return None, of("learned_step_failed", sort=type(error).__name__, error=line)
        trial = None
    if start is not None and start.is_written():
        return None, of("learned_settings")
    return trial, None


def _judged(
    trial: _Trial, result: Any, theirs: Make, is_quantised: bool
) -> tuple[bool | None, Reason | None]:
    """Whether a step by graphs gave what the host's own did, and why not."""
    try:
        references = read_result(result).tensors
    except FixedCallError as error:
        return False, error.reason

    def again(change: Callable[[Any], Any] = lambda value: value) -> list[torch.Tensor]:
        with trial.start.again():
            return read_result(theirs(*_copied(trial.inputs, change))).tensors

    def in_full() -> list[torch.Tensor]:
        with layers.multiplying_in_full(trial.root):
            return again()

    full = in_full if is_quantised else None
    return _compared(trial.results, references, _tensors(trial.inputs), again, full)


def _compared(
    results: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    again: Callable[..., list[torch.Tensor]],
    in_full: Callable[[], list[torch.Tensor]] | None,
) -> tuple[bool | None, Reason | None]:
    """Whether results are the host's, and why not."""
    if len(results) == len(references) and tells_nothing(references):
        return None, None
    if any(str(each.dtype).removeprefix("torch.") not in RELATIVE_L2 for each in references):
        return None, None  # there is no bound
    found = difference(results, references, inputs, in_full=in_full)
    if found.is_good:
        return True, None
    if len(found.errors) == len(references):
        amount = min(found.bounds) / NUDGE
        far = map(relative_l2, again(partial(_nudged, amount)), references)
        if all(
            error <= most or (moved > most and error <= NUDGE * moved)
            for error, most, moved in zip(*found, far, strict=True)
        ):
            return None, None
    return False, of("learned_step_differs", error=f"{found.error:.1e}")


def _nudged(amount: float, value: torch.Tensor) -> torch.Tensor:
    """A latent or a text, moved; a timestep's last bit may count for much, and no block has it."""
    moved: torch.Tensor = nudged(value, amount) if value.dim() > 2 else value
    return moved


class _Start:
    """How a model and the random numbers stood before a step: what is made beside it begins there,
    and leaves nothing.
    """

    def __init__(self, root: torch.nn.Module, device: torch.device) -> None:
        #: But for operators, whose attributes are what loading notes.
        self._parts = [part for part in root.modules() if not layers.is_operator(part)]
        self._device = device
        self._state = self._now()
        self._versions = [
            (tensor, tensor._version)
            for part in self._parts
            for table in (part._parameters, part._buffers)
            for tensor in table.values()
            if tensor is not None
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and not tensor.is_inference()
        ]

    def is_written(self) -> bool:
        """Whether a step wrote into a parameter or a buffer, which nothing puts back. Of those that
        were made for inference PyTorch does not tell.
        """
        return any(tensor._version != version for tensor, version in self._versions)

    def _now(self) -> tuple[Standing, list[torch.Tensor]]:
        return Standing(self._parts), gpu.random_state(self._device)

    def _put(self, state: tuple[Standing, list[torch.Tensor]]) -> None:
        standing, random = state
        standing.put_back()
        gpu.set_random_state(self._device, random)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Begin there once more, until this ends."""
        now = self._now()
        self._put(self._state)
        try:
            yield
        finally:
            self._put(now)


def _copied(value: Any, change: Callable[[Any], Any] = lambda value: value) -> Any:
    """A copy of tensors and containers, for models write into both."""
    if isinstance(value, torch.Tensor):
        return change(value).clone()
    if isinstance(value, Mapping) and type(value) is dict:
        return {name: _copied(each, change) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each, change) for each in value)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
