"""One call of a root module as data: its tensors, and everything else that its result depends on.

Two calls with equal keys run the same kernels on tensors of the same sizes, so a CUDA graph that
was captured from one can be replayed for the other. A call for which that is uncertain is refused
with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from ..code.steady import Steady, steady
from ..host_api import options
from ..reasons import Reason, of

_FUNCTIONS = {
    options.PATCHES: of("patches_may_differ"),
    options.REPLACEMENTS: of("attention_may_differ"),
    options.ATTENTION: of("attention_may_differ"),
}
_NOT_STEADY = Steady(of("code_unknown"), None)
_SEQUENCES = (list, tuple, torch.Size)
_PLAIN = (bool, int, float, str, bytes, type(None), Enum, torch.dtype, torch.device)


class CaptureError(Exception):
    """A call cannot be captured, for a `reason`. The GPU is as it was before."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class CallValues(NamedTuple):
    """The arguments of one call.

    Attributes:
        key: equal for calls that one captured graph serves.
        tensors: the tensors among the arguments, in walking order.
        args, kwargs: as they were passed.
        unread: options that are passed through unchanged.
    """

    key: Hashable
    tensors: list[torch.Tensor]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    unread: frozenset[str]

    def without_memory(self) -> CallValues:
        """Return the same over tensors of equal form without memory."""
        forms = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            for t in self.tensors
        ]
        args, kwargs = self.over(forms)
        return self._replace(tensors=forms, args=args, kwargs=kwargs)

    def over(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return args and kwargs over other tensors; containers are new, as the host uses them
        up.
        """
        others = iter(tensors)

        def swap(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return next(others)
            if type(value) is dict:
                return {
                    name: item if name in self.unread else swap(item)
                    for name, item in value.items()
                }
            if type(value) in _SEQUENCES:
                return type(value)(swap(item) for item in value)
            return value

        args = [swap(value) for value in self.args]
        return args, {name: swap(value) for name, value in self.kwargs.items()}


def arithmetic() -> tuple[Any, ...]:
    """Return the settings of this process that change which kernels run."""
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    return (
        matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_accumulation,
        cudnn.conv.fp32_precision,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


def read_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    unread: frozenset[str] = options.UNREAD,
) -> CallValues:
    """Take a call of a diffusion model apart.

    Args:
        unread: options that its forward does not read.

    Raises:
        CaptureError: another node takes part in the call, or an argument is of an unknown type.
    """
    tensors: list[torch.Tensor] = []
    parts: list[Any] = []

    def walk(value: Any, name: str) -> None:
        _walk(value, name, unread, tensors, parts.append)

    for value in args:
        walk(value, "its arguments")
    for name, value in kwargs.items():
        parts.append(name)
        walk(value, name)
    return CallValues(tuple(parts), tensors, args, kwargs, unread)


def run_steps(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return how many steps the sampler's run of a call has, None if unknown.

    Nothing is read from the GPU.
    """
    sigmas = options.run_sigmas((*args, *kwargs.values()))
    return None if sigmas is None else len(sigmas) - 1


def result_form(result: Any) -> CallValues:
    """Return the form of a call's result, which holds no memory; see `read_result`."""
    return read_result(result).without_memory()


def read_result(result: Any) -> CallValues:
    """Take a call's result apart, as if it were the argument of a call.

    Raises:
        CaptureError: it holds no tensor, or something whose effect is not known.
    """
    read = read_call((result,), {}, frozenset())
    if not read.tensors:
        raise CaptureError(of("returns_no_tensor", sort=type(result).__name__))
    return read


def _walk(
    value: Any,
    name: str,
    unread: frozenset[str],
    tensors: list[torch.Tensor],
    note: Callable[[Any], None],
) -> None:
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise CaptureError(of("no_plain_tensors", name=name, sort=type(value).__name__))
        if value.device.type == "cpu" and any(t.device.type != "cpu" for t in tensors):
            raise CaptureError(of("on_cpu", name=name))
        tensors.append(value)
        note((value.shape, value.stride(), value.dtype, value.device))
    elif type(value) is dict:
        note("{")
        for key, item in value.items():
            if key in unread:
                continue
            if key in _FUNCTIONS:
                if not item:
                    continue
                known = steady(item) if key == options.ATTENTION else _NOT_STEADY
                if known.why_not is not None:
                    raise CaptureError(_FUNCTIONS[key])
                note((key, known.name))
                continue
            note(key)
            _walk(item, str(key), unread, tensors, note)
        note("}")
    elif type(value) in _SEQUENCES:
        note((type(value).__name__, len(value)))
        for item in value:
            _walk(item, name, unread, tensors, note)
    elif isinstance(value, _PLAIN):
        note(value)
    else:
        raise CaptureError(of("unknown_effect", name=name, sort=type(value).__name__))
