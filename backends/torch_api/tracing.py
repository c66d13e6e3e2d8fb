"""Torch's fakes and symbolic sizes for exporting and lowering a region.

Sources: torch/_subclasses/fake_tensor.py and torch/fx/experimental/ of torch 2.10-2.15.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

#: Sizes together that a condition is tried with.
MOST_TRIED = 1 << 23
_LARGEST = 1 << 58


def fake_mode() -> Any:
    """Return a fresh FakeTensorMode with symbolic shapes, for models without weights."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def size_oblivious() -> Any:
    """Patch: symbols may be 0 or 1 without specialising. Hold it while exporting and lowering."""
    import torch.fx.experimental._config as settings

    config: Any = settings
    return config.patch(backed_size_oblivious=True)


@contextlib.contextmanager
def conditions_tried() -> Iterator[None]:
    """Decide conditions on parts of sizes that torch's algebra cannot (say, that a half and the
    rest are two parts) by trying all sizes. Otherwise torch takes what holds for the example as a
    condition that narrows the size.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment: Any = ShapeEnv
    evaluate = getattr(environment, "_maybe_evaluate_static", None)
    if evaluate is None:
        yield
        return

    @functools.wraps(evaluate)  # its cache is cleared by name
    def tried(self: Any, condition: Any, *args: Any, **options: Any) -> Any:
        found = evaluate(self, condition, *args, **options)
        return _tried(self, condition) if found is None else found

    environment._maybe_evaluate_static = tried
    try:
        yield
    finally:
        environment._maybe_evaluate_static = evaluate


def _tried(environment: Any, condition: Any) -> Any:
    """A condition's value for all sizes; None if it varies or is not tried."""
    import sympy
    from torch.utils._sympy.functions import FloorDiv

    if not isinstance(condition, sympy.logic.boolalg.Boolean) or not condition.has(FloorDiv):
        return None
    known = {each: environment.var_to_range.get(each) for each in condition.free_symbols}
    try:
        bounds = [(each, int(found.lower), int(found.upper)) for each, found in known.items()]
        # A range that begins at 2 is one from 1 on, as torch traces it.
        ranges = [(each, 1 if low == 2 else low, high) for each, low, high in bounds]
        return _of_all(condition, tuple(sorted(ranges, key=str)))
    except (ArithmeticError, AttributeError, NameError, TypeError, ValueError):
        return None  # a size has no bounds, or there is something that numpy does not know


@functools.lru_cache(maxsize=4096)
def _of_all(condition: Any, ranges: tuple[tuple[Any, int, int], ...]) -> Any:
    import numpy as np
    import sympy

    floors = dict.fromkeys(("FloorDiv", "CleanDiv"), np.floor_divide)
    own = {**floors, "Mod": np.mod, "PythonMod": np.mod}
    holds = sympy.lambdify([each for each, _, _ in ranges], condition, modules=[own, "numpy"])

    def found(sizes: Sequence[Any]) -> Any:
        with np.errstate(all="raise"):
            held = np.asarray(holds(*np.meshgrid(*sizes, indexing="ij", sparse=True)))
        if held.dtype != bool:
            raise TypeError(f"a condition must be true or false, got {held.dtype}")
        return sympy.true if held.all() else None if held.any() else sympy.false

    corners = [np.unique([low, min(low + 1, high), high]) for _, low, high in ranges]
    too_many = math.prod(high - low + 1 for _, low, high in ranges) > MOST_TRIED
    if too_many or _may_overflow(condition, ranges) or found(corners) is None:
        return None
    return found([np.arange(low, high + 1, dtype=np.int64) for _, low, high in ranges])


def _may_overflow(condition: Any, ranges: Sequence[tuple[Any, int, int]]) -> bool:
    """Whether a part of a condition (largest at the largest sizes) nears 64 bits."""
    import sympy

    largest = {symbol: sympy.Integer(high) for symbol, _, high in ranges}
    parts = (part for part in sympy.preorder_traversal(condition) if isinstance(part, sympy.Expr))
    return any(abs(int(part.xreplace(largest))) >= _LARGEST for part in parts)


@contextlib.contextmanager
def fakes_worked_out() -> Iterator[None]:
    """Turn off the fakes' cache, which costs more than it saves with symbolic sizes: two fifths of
    exporting a Flux double block.
    """
    from torch._dynamo import config as settings

    config: Any = settings
    known = hasattr(config, "fake_tensor_cache_enabled")
    with config.patch(fake_tensor_cache_enabled=False) if known else contextlib.nullcontext():
        yield


def uses_cudnn() -> bool:
    """Tell whether convolutions on a GPU run by cuDNN."""
    return bool(torch.backends.cudnn.enabled)


@contextlib.contextmanager
def cudnn(enabled: bool) -> Iterator[None]:
    """Trace with cuDNN on or off. `torch.export` turns it off, and so traces convolutions whose
    results are not channels-last as cuDNN's are.
    """
    set_flags: Any = torch.backends.cudnn.set_flags
    before = set_flags(_enabled=enabled)
    try:
        yield
    finally:
        set_flags(*before)


def compiled_from(module: Any) -> Any:
    """Return the module that `torch.compile` made this one of, or None."""
    return getattr(module, "_orig_mod", None)


def operator_name(function: Any) -> str | None:
    """Return a `torch.ops` operator's name, "library.operator"; None for all else."""
    if not isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return None
    return str(function).removesuffix(".default")


def may_write(function: Any) -> bool:
    """Tell whether a node's target may write into a tensor: mutable, or with a graph of its own."""
    if isinstance(function, torch._ops.OpOverload):
        return bool(function._schema.is_mutable)
    return isinstance(function, torch._ops.HigherOrderOperator)


def realized(value: torch.Tensor) -> torch.Tensor:
    """Keep a traced value in memory, where Inductor would recompute it for every element that reads
    it.

    Uses an operator of torch's own tests; without it the value is only slower.
    """
    try:
        import torch._inductor.test_operators  # registers it

        realize: Any = torch.ops._inductor_test.realize
    except (ImportError, AttributeError):
        return value
    result: torch.Tensor = realize(value)
    return result


def is_surely(condition: Any) -> bool:
    """Whether a condition holds for all symbolic sizes; asking narrows nothing."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def are_surely_equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sizes are equal whatever their symbols are."""
    return len(sizes) == len(others) and all(
        is_surely(a == b) for a, b in zip(sizes, others, strict=True)
    )


def is_by_channels(images: torch.Tensor) -> bool:
    """Whether a traced `[batch, C, height, width]` surely is channels-last without gaps."""
    _, channels, height, width = images.shape
    strides = (height * width * channels, 1, width * channels, channels)
    return are_surely_equal(images.stride(), strides)
