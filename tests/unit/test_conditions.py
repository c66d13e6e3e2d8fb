"""Conditions on parts of a size are decided for all that it may be, as far as trying it tells."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from warmgraph_backends.torch_api import tracing


class _InParts(torch.nn.Module):
    """Computes rows part by part, as the host does where a call is long."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(x, self.parts, dim=1)
        return x + torch.cat([self.layer(part) for part in parts], dim=1)


class _Evenly(torch.nn.Module):
    """Does something else with an even number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[1] // 2 * 2 == x.shape[1] else x - 1


def _export(module: torch.nn.Module, low: int, high: int) -> Any:
    dims = [torch.export.Dim("batch", min=2, max=64), torch.export.Dim("rows", min=low, max=high)]
    shapes = ({0: dims[0], 1: dims[1]},)
    x = torch.zeros(2, low + 2, 4)
    with torch.no_grad(), tracing.size_oblivious(), tracing.conditions_tried():
        return torch.export.export(module, (x,), dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_length_are_exported_for_all_lengths(parts: int) -> None:
    module = _InParts(parts).eval()
    exported = _export(module, 8193, 131072).module()
    for rows in (8193, 8194, 9001):
        x = torch.randn(3, rows, 4)
        torch.testing.assert_close(exported(x), module(x))


def test_what_hangs_on_a_size_still_narrows_it() -> None:
    with pytest.raises(Exception, match="Constraints violated"):
        _export(_Evenly(), 8, 128)


def test_parts_that_are_not_always_as_many_still_narrow_a_size() -> None:
    """Five rows in four parts are three."""
    with pytest.raises(Exception, match="Constraints violated"):
        _export(_InParts(4), 4, 128)


class _Halves(torch.nn.Module):
    """Goes by what is so from two frames on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = x.shape[1]
        half = (frames + 1) // 2
        return x + 1 if half * 2 - frames + frames // 2 < frames else x - 1


def test_what_one_alone_does_otherwise_still_narrows_a_size() -> None:
    """It is traced from two on, and runs from one on."""
    assert isinstance(_export(_Halves(), 3, 128), torch.export.ExportedProgram)
    with pytest.raises(Exception, match="Constraints violated"):
        _export(_Halves(), 2, 128)


def test_numbers_that_64_bits_do_not_hold_and_divisions_by_nought_are_not_tried() -> None:
    size = sympy.Symbol("size", integer=True)
    always = FloorDiv(size, 3) * size**2 >= 0
    assert tracing._of_all(always, ((size, 1, 1 << 16),)) is sympy.true
    assert tracing._of_all(always, ((size, 1, 1 << 20),)) is None
    with pytest.raises(ArithmeticError):
        tracing._of_all(sympy.Eq(FloorDiv(size, size - 2), 0), ((size, 1, 64),))


def test_more_sizes_than_are_tried_leave_a_condition_open() -> None:
    with pytest.raises(Exception, match="Constraints violated"):
        _export(_InParts(2), 8, 2 * tracing.MOST_TRIED)
