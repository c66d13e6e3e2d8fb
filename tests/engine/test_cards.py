"""Models on several cards: MultiGPU CFG Split, and what the host's nodes place on another card.

Both cards are the processor. The split is the host's own: a copy of the model for the second card,
with weights of its own, and a thread for each of the two.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .cards import SECOND, cards, session_of, split
from .lab import TOLERANCE, Lab, relative
from .probed import Probed

__all__ = ["cards"]

pytestmark = pytest.mark.usefixtures("cards")


class Split:
    """A narrow SDXL under the split, with Compile Model before or behind it."""

    def __init__(self, lab: Lab, host: Host, order: str = "before") -> None:
        self.lab, self.model = lab, Probed(lab, host)
        self.plain = split(self.model.plain)
        before = order == "before"
        self.ours = split(self.model.model) if before else lab.compiled(self.plain)
        self.session = session_of(self.ours)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.lab.engine.report(self.ours)
        return report

    def check(self, **options: Any) -> torch.Tensor:
        """Sample, and assert that both halves ran all compiled, at no build, and are right."""
        jobs, before = self.lab.jobs(), self.report()["calls"]
        eager = self.model.sample(self.plain, **options)
        image = self.model.sample(self.ours, **options)
        report = self.report()
        assert relative(image, eager) < TOLERANCE and not torch.equal(image, eager)
        total = report["regions"]["total"]
        assert report["eager"] == [], (report["eager"], report["notes"])
        assert report["regions"] == {"total": total, "compiled": total, "eager": 0}
        assert report["calls"]["eager"] == before["eager"]
        calls = report["calls"]["compiled"] - before["compiled"]
        assert calls == 2 * options.get("steps", 1) * total > 0
        assert self.lab.jobs() == jobs and self.session.running is None
        return image


@pytest.mark.parametrize("order", ["before", "behind"])
def test_under_a_split_both_cards_run_compiled(lab: Lab, host: Host, order: str) -> None:
    it = Split(lab, host, order)
    threads, drops = set(), []
    step, bound = it.session.step, it.session.scope._bound
    it.session.scope.drop_captured = lambda: drops.append(1)

    def noted(*args: Any, **named: Any) -> Any:
        threads.add(threading.current_thread())
        return step(*args, **named)

    it.session.step = noted
    it.check(steps=3)
    it.check(steps=2, batch=4, size=(12, 8))
    assert it.session.scope._bound is bound and drops == [], "the first one's was described anew"
    [card] = it.session.cards
    assert card.device == SECOND and card.scope.compiled_calls == 5 * len(card.scope.plan.places)
    assert len(threads) == 4
    it.model.check(steps=2)
