"""DeepCache on a model that the host spreads over several cards."""

from __future__ import annotations

import pytest
import torch

from ..cards import SECOND, cards, put, split
from .cached import Pair, cache_of, cached

__all__ = ["cards"]


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize("order", ["before", "behind"])
def test_it_steps_aside_where_a_model_is_spread_over_several_cards(sd15: Pair, order: str) -> None:
    """The processor stands for both: only what ran on the first one would be cached."""
    expected = sd15.sample(split(sd15.model))
    ours = split(cached(sd15.model)) if order == "before" else cached(split(sd15.model))
    cache = cache_of(ours)
    assert torch.equal(sd15.sample(ours), expected)
    assert cache.problem is not None and "MultiGPU CFG Split" in cache.problem
    assert cache.evaluations["shallow"] == 0
    alone = cached(sd15.model)
    assert not torch.equal(sd15.sample(alone), expected)
    assert cache_of(alone).problem is None and cache_of(alone).evaluations["shallow"] > 0


def test_a_model_that_was_copied_to_another_card_behind_the_node_is_named(sd15: Pair) -> None:
    """In the other order it is cached there."""
    copied = put(sd15.model, SECOND)
    expected, ours = sd15.sample(copied), put(cached(sd15.model), SECOND)
    assert torch.equal(sd15.sample(ours), expected)
    problem = cache_of(ours).problem
    assert problem is not None and "Select Model Device" in problem
    behind = cached(copied)
    assert not torch.equal(sd15.sample(behind), expected)
    assert cache_of(behind).problem is None and cache_of(behind).evaluations["shallow"] > 0
