"""A tensor takes another one's memory over only where nobody else has a part in either's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.torch_api import storages

HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a slice": lambda x: x[:, 4:],
    "the whole of it by another name": lambda x: x.detach(),
    "as another dtype": lambda x: x.view(torch.int32),
    "its storage": lambda x: x.untyped_storage(),
    "an array": lambda x: x.numpy(),
    "a capsule": lambda x: x.__dlpack__(),
}


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 8), torch.ones(2, 8)


@pytest.mark.parametrize("inference", [True, False])
def test_what_a_result_holds_is_the_tensors_without_a_copy(inference: bool) -> None:
    with torch.inference_mode(inference):
        tensor, result = pair()
        kept, address = tensor, result.data_ptr()
        assert storages.take_over(tensor, result)
        del result
        assert kept.data_ptr() == address and torch.equal(kept, torch.ones(2, 8))
        kept += 1  # as the host's next block does
        assert torch.equal(kept, torch.full((2, 8), 2.0))
        assert storages.take_over(kept, torch.zeros(2, 8)), "and once more"


def test_a_tensor_that_was_made_outside_of_inference_mode_takes_over_within() -> None:
    tensor = torch.zeros(2, 8)
    with torch.inference_mode():
        assert storages.take_over(tensor, torch.ones(2, 8))
    assert torch.equal(tensor + 1, torch.full((2, 8), 2.0)) and not tensor.is_inference()


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("inference", [True, False])
def test_memory_that_somebody_else_has_a_part_in_stays(holder: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        for shared in (0, 1):
            both = pair()
            kept = HOLDERS[holder](both[shared])
            addresses = [each.data_ptr() for each in both]
            assert not storages.take_over(*both)
            assert [each.data_ptr() for each in both] == addresses and not both[0].any()
            del kept
        assert storages.take_over(*pair()), "each is told apart from one that nobody shares"


def test_a_view_whose_whole_is_gone_owns_its_memory() -> None:
    with torch.inference_mode():
        assert storages.take_over(torch.zeros(4, 8)[1:3], torch.ones(2, 8))


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "sizes": lambda: torch.ones(8, 2),
    "strides": lambda: torch.ones(8, 2).t(),
    "dtype": lambda: torch.ones(2, 8, dtype=torch.float64),
    "device": lambda: torch.ones(2, 8, device="meta"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_result_of_other_form_is_not_taken_over(what: str) -> None:
    tensor = torch.zeros(2, 8)
    assert not storages.take_over(tensor, OTHERS[what]()) and not tensor.any()


def test_what_learns_is_left() -> None:
    for tensor in (torch.nn.Parameter(torch.zeros(2, 8)), torch.zeros(2, 8).requires_grad_()):
        assert not storages.take_over(tensor, torch.ones(2, 8)) and not tensor.any()


def test_where_torch_does_not_tell_nothing_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    storages._alone.cache_clear()
    try:
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
        assert not storages.take_over(*pair())
    finally:
        storages._alone.cache_clear()
    monkeypatch.undo()
    assert storages.take_over(*pair())
