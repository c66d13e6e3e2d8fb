"""A report's lines on each further card that a model runs on."""

from __future__ import annotations

from typing import Any

from ..device.gpu import is_gpu, name
from ..runtime.cards import Card
from ..runtime.last_run import parts
from ..runtime.session import Session, standing_of
from .lines import Line, line, told


def cards_of(session: Session) -> list[dict[str, Any]]:
    """Return the state of the copies of a session's model, as JSON-plain data; may be empty."""
    return [_card(card) for card in session.cards if card.device is not None]


def card_lines(report: dict[str, Any], milliseconds: Any) -> list[Line]:
    """Say how the copies in a report stand.

    Args:
        milliseconds: puts a time into words.
    """
    lines = []
    for card in report["cards"]:
        told = {"device": card["device"], **card["regions"]}
        told.pop("eager")
        if card["ms"] is None:
            lines.append(line("on_card", **told))
        else:
            lines.append(line("on_card_timed", **told, now=milliseconds(card["ms"])))
    return lines


def why_lines(report: dict[str, Any]) -> list[Line]:
    """Say what is not compiled on further cards."""
    return [
        line("on_card_not", device=card["device"], places=each["places"], reason=each["reason"])
        for card in report["cards"]
        for each in card["eager"]
    ]


def _card(card: Card) -> dict[str, Any]:
    device, found = card.device, parts(*standing_of(card.scope, card.counts))
    assert device is not None
    speed, compiled = card.pace.speed(), found.compiled + found.ready
    reasons: dict[Any, int] = {}
    for _, reason in found.eager:
        reasons[reason] = reasons.get(reason, 0) + 1
    scope = card.scope
    return {
        "device": str(device),
        "name": name(device) if is_gpu(device) else "",
        "regions": {
            "total": compiled + len(found.eager),
            "compiled": compiled,
            "eager": len(found.eager),
        },
        "eager": [{**told(reason), "places": count} for reason, count in reasons.items()],
        "calls": scope.compiled_calls,
        "replayed": 0 if scope.replays is None else scope.replays.replayed,
        "ms": None if speed is None else round(speed.ms[speed.form], 3),
    }
