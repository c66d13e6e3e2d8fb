"""Compares a built graph with the host's eager code, at the ends of its ranges of sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..contract import Program
from ..device.gpu import is_gpu
from ..errors import BuildError
from ..kinds.layout import is_laid_out
from ..kinds.tolerance import Outcome, judge
from ..operators import host_layer
from ..reasons import of


class _Limits(NamedTuple):
    """The limits of one check; extremes beyond them are tried up to the limit.

    Attributes:
        elements: of a tensor.
        tokens: in attention, whose cost is their square.
    """

    elements: int
    tokens: int


_ON_GPU = _Limits(1 << 27, 1 << 14)
_ON_PROCESSOR = _Limits(1 << 22, 1 << 11)


def checked(program: Program, call: Callable[[list[Any]], Any]) -> list[dict[str, Any]]:
    """Run graph and eager side by side at the ends of every declared range.

    A size at which the host's own result is wrong is skipped: PyTorch's bfloat16 convolutions of
    stride 2 are, at one or two columns, on processors with AMX (pytorch#169688).

    Returns:
        "sizes" and "error" of each conclusive size, for the manifest.

    Raises:
        BuildError: a result differs, has another layout or is not the graph's own; or no size was
            conclusive.
    """
    checks = []
    rounds = any(host_layer.rounded_paths(program.description.module))
    label, layout = program.description.label, program.description.layout
    for sizes in _extremes(program):
        weights, inputs = program.example(sizes)
        references = program.run(weights, inputs)
        results = tuple(call([*weights, *inputs]))
        for i, result in enumerate(results):
            others = (*weights, *inputs, *results[:i])
            if not is_laid_out(result, layout) or any(_shares(result, t) for t in others):
                raise BuildError(of("not_its_own", label=label, layout=layout))
        in_full = partial(program.run_in_full, weights, inputs) if rounds else None
        exact = partial(_exact, program, weights, inputs)
        found = judge(results, references, inputs, in_full=in_full, exact=exact)
        if found.outcome is Outcome.BAD:
            error = f"{found.error:.2e}"
            raise BuildError(of("built_wrong", label=label, error=error, sizes=sizes))
        if found.is_good:
            checks.append({"sizes": sizes, "error": found.error})
    if not checks:
        raise BuildError(of("host_is_wrong", label=label))
    return checks


def _exact(
    program: Program, weights: list[torch.Tensor], inputs: list[Any]
) -> Sequence[torch.Tensor]:
    """The same maths in float64; nothing if the host's code does not accept it."""

    def exact(value: Any) -> Any:
        return value.double() if torch.is_tensor(value) else value

    try:
        return program.run([exact(w) for w in weights], [exact(i) for i in inputs])
    except Exception:  # the host's code
        return ()


def _shares(result: torch.Tensor, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and result.data_ptr() == other.data_ptr()


def _extremes(program: Program) -> Iterator[dict[str, int]]:
    """All symbols at the lower end, then small; each at its lower end with the others small, as
    code may branch on a size of 1; each at its upper end with the others at theirs.
    """
    symbols = program.description.symbols
    limits = _ON_GPU if is_gpu(program.description.device) else _ON_PROCESSOR
    small = {
        s.name: max(s.minimum, min(s.maximum, n)) for s, n in zip(symbols, _SMALL, strict=False)
    }
    least = {s.name: s.minimum for s in symbols}
    yield least
    yield small
    yield from (small | {s.name: s.minimum} for s in symbols if len(symbols) > 1)
    for symbol in symbols:
        name, most, least_that_tells = symbol.name, symbol.maximum, max(symbol.minimum, 2)
        if program.attends and name != "batch":
            most = max(least_that_tells, min(most, limits.tokens))
        while _elements(program, least | {name: most}) > limits.elements and (
            most > least_that_tells
        ):
            most = max(least_that_tells, math.ceil(most / 2))
        yield least | {name: most}


_SMALL = (3, 5, 7, 11, 13, 17, 19)


def _elements(program: Program, sizes: dict[str, int]) -> float:
    largest = 0
    for spec in program.description.inputs:
        if spec.dtype != "int":
            largest = max(
                largest, math.prod(sizes[d] if isinstance(d, str) else d for d in spec.dims)
            )
    return largest * program.work
