"""Copies that pieces read their weights from: all kinds' in the same memory, small ones at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.cuda_graphs.piece import Statics
from warmgraph_backends.cuda_graphs.piece_weights import Copies
from warmgraph_backends.weights.fetching import Fetched
from warmgraph_tools import small_transformers
from warmgraph_tools.inprocess import Host


def _fetched(seed: int, *shapes: tuple[int, ...], given: Any = None) -> Fetched:
    """Of three dtypes, one of them by columns."""
    torch.manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.int8)
    tensors = [
        torch.randint(-9, 9, shape).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)
    ]
    tensors[0] = tensors[0].t()
    return Fetched(tensors, given or {}, "streamed", None)


LARGE = (300, 200), (7,), (200, 300), (1,), (3, 5, 7)
SMALL = (20, 30), (400,), (5, 5)


def test_kinds_have_their_copies_in_the_same_memory_by_turns() -> None:
    statics = Statics()
    large, small = _fetched(0, *LARGE), _fetched(1, *SMALL)
    kinds = [(large, Copies(large, statics)), (small, Copies(small, statics))]
    held = statics.held_bytes
    assert (
        sum(t.nbytes for t in large.tensors)
        <= held
        < 1.01 * sum(t.nbytes for t in (*large.tensors, *small.tensors))
    )
    addresses = [[t.data_ptr() for t in copies.tensors] for _, copies in kinds]
    assert addresses[0][0] == addresses[1][0] and not any(
        a % 16 for each in addresses for a in each
    )
    for turn in range(3):
        for number, (first, copies) in enumerate(kinds):
            shapes = (LARGE, SMALL)[number]
            now = first if turn == 0 else _fetched(10 * turn + number, *shapes)
            assert copies.take(now)
            assert [t.data_ptr() for t in copies.tensors] == addresses[number]
            for mine, value in zip(copies.tensors, now.tensors, strict=True):
                assert mine.stride() == value.stride() and torch.equal(mine, value)
    del kinds, copies
    assert statics.held_bytes == 0


def test_a_kind_that_is_too_large_gets_memory_of_its_own() -> None:
    statics = Statics()
    small, large = _fetched(1, *SMALL), _fetched(0, *LARGE)
    first = Copies(small, statics)
    second = Copies(large, statics)
    for mine, value in zip(first.tensors, small.tensors, strict=True):
        assert torch.equal(mine, value)
    third = Copies(small, statics)
    assert third.tensors[0].data_ptr() in (
        first.tensors[0].data_ptr(),
        second.tensors[0].data_ptr(),
    )


def test_other_forms_are_not_taken() -> None:
    copies = Copies(_fetched(0, *SMALL), Statics())
    kept = [t.clone() for t in copies.tensors]
    assert not copies.take(_fetched(1, *SMALL, (1,)))
    assert not copies.take(_fetched(1, (30, 20), *SMALL[1:]))
    assert all(map(torch.equal, copies.tensors, kept))


@pytest.mark.parametrize("file", ["int8_convrot", "fp8_e4m3fn"])
def test_quantised_weights_are_copied_with_all_their_parts(host: Host, file: str) -> None:
    model = small_transformers.load_quantised("flux1", file).model.diffusion_model
    layers = [m for m in model.modules() if getattr(m, "quant_format", None)]
    same = [m for m in layers if m.weight.shape == layers[0].weight.shape][:2]
    assert len(same) == 2
    one, other = (
        _fetched(n, *SMALL, given={"layer": (layer.weight, layer.bias), "plain": (None, None)})
        for n, layer in enumerate(same)
    )
    copies = Copies(one, Statics())
    for fetched in (one, other):
        assert copies.take(fetched)
        mine, bias = copies.given["layer"]
        weight = fetched.given["layer"][0]
        assert type(mine) is type(weight) and torch.equal(mine.dequantize(), weight.dequantize())
        assert bias is None or torch.equal(bias, fetched.given["layer"][1])
        assert copies.given["plain"] == (None, None)
    assert not torch.equal(same[0].weight.dequantize(), same[1].weight.dequantize())
