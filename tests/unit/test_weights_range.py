"""Pages of the host's dynamic VRAM are held while a call needs them, and then let go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from warmgraph_backends.runtime.weights import ModelWeights

DEVICE = torch.device("cpu")


class Range:
    """Counts as the host's `ModelVBAR` does: each fault holds all pages once more."""

    base_addr, offset = 4096, 100

    def __init__(self) -> None:
        self.pins = 0
        self.floor = 0
        self.faults = 0
        self.fits = True

    def fault(self, address: int, size: int) -> list[int] | None:
        assert (address, size) == (self.base_addr, self.offset)
        self.faults += 1
        self.pins += self.fits
        return [7] if self.fits else None

    def unpin(self, address: int, size: int) -> None:
        assert (address, size) == (self.base_addr, self.offset)
        self.pins -= 1

    def set_watermark_limit(self, size: int) -> None:
        self.floor = size


@pytest.fixture
def pages() -> Range:
    return Range()


@pytest.fixture
def weights(pages: Range) -> ModelWeights:
    return ModelWeights(SimpleNamespace(dynamic_vbars={DEVICE: pages}), DEVICE, torch.float16)


def test_pages_are_held_once_by_all_that_hold_them(weights: ModelWeights, pages: Range) -> None:
    """A captured call holds them, and so does each region within it."""
    outer = weights.hold_range()
    for _ in range(3):
        assert weights.hold_range() == outer == b"\x07"
        weights.let_range_go()
    assert (pages.pins, pages.faults, pages.floor) == (1, 1, pages.offset)
    weights.let_range_go()
    assert (pages.pins, pages.floor) == (0, 0)
    assert weights.hold_range() == outer
    weights.let_range_go()
    assert (pages.pins, pages.faults, pages.floor) == (0, 2, 0)


def test_a_run_that_ended_in_the_middle_leaves_nothing_held(
    weights: ModelWeights, pages: Range
) -> None:
    weights.hold_range()
    weights.hold_range()
    weights.begin_run()
    assert (pages.pins, pages.floor) == (0, 0)


def test_pages_that_do_not_fit_are_not_asked_for_again_in_a_run(
    weights: ModelWeights, pages: Range
) -> None:
    pages.fits = False
    assert weights.hold_range() is None and weights.hold_range() is None
    weights.let_range_go()
    assert (pages.pins, pages.faults, pages.floor) == (0, 1, 0)
    pages.fits = True
    weights.begin_run()
    assert weights.hold_range() is not None
    weights.let_range_go()
    assert pages.pins == 0
