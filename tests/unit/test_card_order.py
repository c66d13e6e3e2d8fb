"""In which order the cards' parts of one evaluation are queued."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from warmgraph_backends.several_cards import order
from warmgraph_backends.several_cards.order import CardOrder

LONG = 20.0
CARD = "card 1"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "LIMIT_S", LONG)


class Cards:
    """Two cards' threads, and what they did in order."""

    def __init__(self) -> None:
        self.order, self.said = CardOrder(), list[str]()

    def evaluate(self, count: int = 2, *, first: float = 0.0, other: float = 0.0) -> list[str]:
        """One evaluation by both cards, whose threads come so many seconds late."""
        self.order.begin(count)
        self.said = []
        with ThreadPoolExecutor(2) as pool:
            for each in (pool.submit(self._first, first), pool.submit(self._other, other)):
                each.result(timeout=60)
        return self.said

    def _first(self, late: float) -> None:
        time.sleep(late)
        with self.order.first():
            self.said.append("first queues")
            time.sleep(0.05)
            self.said.append("first is queued")

    def _other(self, late: float) -> None:
        time.sleep(late)
        self.said.append("other has its inputs")
        with self.order.other(CARD):
            pass
        self.said.append("other hands on")


ORDER = ["other has its inputs", "first queues", "first is queued", "other hands on"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("first", "other"), [(0.0, 0.1), (0.1, 0.0)])
def test_the_first_card_queues_between_the_others_inputs_and_their_results(
    first: float, other: float
) -> None:
    cards = Cards()
    cards.evaluate()
    for _ in range(3):
        assert cards.evaluate(first=first, other=other) == ORDER


@pytest.mark.usefixtures("patient")
def test_in_the_first_evaluation_nobody_waits() -> None:
    cards = Cards()
    assert cards.evaluate(other=0.2)[:2] == ["first queues", "first is queued"]
    assert cards.evaluate(count=3, first=0.2)[:2] == ["other has its inputs", "other hands on"]


@pytest.mark.usefixtures("patient")
def test_who_took_no_part_in_the_last_evaluation_of_as_many_is_not_waited_for() -> None:
    """One conditioning goes to one card, whichever that is; two go to both."""
    cards = Cards()
    cards.evaluate()
    begin = time.monotonic()
    for count in (1, 2, 1, 2):
        if count == 1:
            cards.order.begin(count)
            with cards.order.first():
                pass
        else:
            cards.evaluate(other=0.1)
    assert time.monotonic() - begin < LONG and cards.said == ORDER


def test_who_does_not_come_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "LIMIT_S", 0.3)
    cards, waited = Cards(), []
    cards.evaluate()
    for _ in range(2):
        cards.order.begin(2)
        begin = time.monotonic()
        with cards.order.first():
            waited.append(time.monotonic() - begin)
    assert waited[0] >= 0.25 > waited[1]


@pytest.mark.usefixtures("patient")
def test_an_error_on_the_first_card_lets_the_others_go() -> None:
    cards = Cards()
    cards.evaluate()
    cards.order.begin(2)

    def fail() -> Any:
        with cards.order.first():
            raise ValueError("cancelled")

    other = threading.Thread(target=cards._other, args=(0.0,))
    other.start()
    with pytest.raises(ValueError, match="cancelled"):
        fail()
    other.join(timeout=5)
    assert not other.is_alive()
