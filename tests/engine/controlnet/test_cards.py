"""A ControlNet under the host's split: a network on each card."""

from __future__ import annotations

import pytest

from warmgraph_backends.attaching import controlnet

from ..cards import SECOND, cards, split
from ..controlled import Controlled
from ..lab import TOLERANCE, relative

__all__ = ["cards"]


@pytest.mark.usefixtures("cards")
def test_under_a_split_the_network_of_each_card_runs_compiled(xl: Controlled) -> None:
    spread = split(xl.model)
    before = xl.report()["calls"]
    applied = xl.apply(xl.ours)
    eager = xl.sample(xl.apply(xl.plain), spread)
    for _ in range(2):
        assert relative(xl.sample(applied, spread), eager) < TOLERANCE
    after = xl.report()
    assert after["calls"]["eager"] == before["eager"] and after["regions"]["eager"] == 0
    total = after["regions"]["total"]
    assert after["calls"]["compiled"] - before["compiled"] == 2 * 2 * 2 * total > 0
    [card] = [each for each in after["cards"] if each["calls"]]
    assert card["device"] == str(SECOND) and card["regions"]["eager"] == 0
    session = controlnet.carried(xl.ours)
    assert session is not None and len(list(session.cards)) >= 1
    assert all(each.scope.root is not xl.network for each in session.cards)
    xl.check()  # without the split afterwards
