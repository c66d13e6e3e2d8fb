"""Names of Triton's kernels, short enough for Windows.

Triton names files by their kernel, and Windows opens no path of 260 characters. Inductor joins the
names of all operators that it fused, up to 142 characters.
Source: `define_kernel` in torch/_inductor/codegen/triton.py of torch 2.10-2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

#: Characters of a kernel's name. With a user's name of 20 letters and process numbers of 6 digits,
#: Triton's longest temporary path has 259 characters then (`tests/compile/test_pretended_card.py`).
LONGEST = 35
#: What is left of it for operators between `triton_red_` and `_123`.
_OPERATORS = LONGEST - len("triton_red_") - len("_123")
#: Operators that only move elements say least of a kernel.
_MOVES = frozenset(
    {
        "_to_copy",
        "_unsafe_view",
        "as_strided",
        "clone",
        "expand",
        "permute",
        "repeat",
        "select",
        "slice",
        "split_with_sizes",
        "squeeze",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
    }
)


@contextlib.contextmanager
def short_names() -> Iterator[None]:
    """Have Inductor name kernels so. In a worker, which compiles one graph at a time.

    A torch that names kernels elsewhere keeps its own names.
    """
    from torch._inductor import utils
    from torch._inductor.codegen import triton

    codegen: Any = triton
    name = getattr(codegen, "get_fused_kernel_name", None)
    origins = getattr(utils, "aggregate_origins", None)
    if name is None or origins is None:
        yield
        return

    def short(schedule: Any, *how: Any) -> str:
        whole: str = name(schedule, *how)
        return whole if len(whole) <= _OPERATORS else shortened(_operators(origins(schedule)))

    codegen.get_fused_kernel_name = short
    try:
        yield
    finally:
        codegen.get_fused_kernel_name = name


def shortened(operators: Iterable[str]) -> str:
    """Name the operators that say most, as many as fit, in the order of the alphabet.

    Args:
        operators: as PyTorch names them, without their overloads.
    """
    words = {name.strip("_") for name in set(operators) - _MOVES}
    found: list[str] = []
    for word in sorted(words, key=lambda word: (-len(word), word)):
        if len("_".join([*found, word])) <= _OPERATORS:
            found.append(word)
    return "_".join(sorted(found)) or "fused"


def _operators(nodes: Iterable[Any]) -> set[str]:
    """The operators of the exported program that a kernel computes, of its nodes in the graph."""
    found = [node.meta.get("original_aten") for node in nodes if node.op == "call_function"]
    return {
        operator._overloadpacket.__name__
        for operator in found
        if isinstance(operator, torch._ops.OpOverload)
    }
