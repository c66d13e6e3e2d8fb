"""What a report says of each further card that a model runs on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..device.gpu import is_gpu, name

L = TypeVar("L")


def cards_of(
    cards: Iterable[Any], parts_of: Callable[[Any], Any], told: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the state of the copies of a session's model, as JSON-plain data; may be empty.

    Args:
        parts_of: says how a copy's parts stand (`last_run.PartCounts`).
        told: puts a reason into plain data.
    """
    return [_card(card, parts_of(card), told) for card in cards if card.scope.device is not None]


def card_lines(
    report: dict[str, Any], milliseconds: Callable[[float], str], line: Callable[..., L]
) -> list[L]:
    """Say how the copies in a report stand.

    Args:
        milliseconds: puts a time into words.
        line: makes a sentence (`sessions.lines`).
    """
    lines = []
    for card in report["cards"]:
        counts = {name: count for name, count in card["regions"].items() if name != "eager"}
        if card["ms"] is None:
            lines.append(line("on_card", device=card["device"], **counts))
        else:
            now = milliseconds(card["ms"])
            lines.append(line("on_card_timed", device=card["device"], **counts, now=now))
    return lines


def why_lines(report: dict[str, Any], line: Callable[..., L]) -> list[L]:
    """Say what is not compiled on further cards."""
    return [
        line("on_card_not", device=card["device"], places=each["places"], reason=each["reason"])
        for card in report["cards"]
        for each in card["eager"]
    ]


def _card(card: Any, parts: Any, told: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    scope, device, speed = card.scope, card.scope.device, card.pace.speed()
    compiled, reasons = parts.compiled + parts.ready, Counter(reason for _, reason in parts.eager)
    return {
        "device": str(device),
        "name": name(device) if is_gpu(device) else "",
        "regions": {
            "total": compiled + len(parts.eager),
            "compiled": compiled,
            "eager": len(parts.eager),
        },
        "eager": [{**told(reason), "places": count} for reason, count in reasons.items()],
        "calls": scope.compiled_calls,
        "replayed": 0 if scope.replays is None else scope.replays.replayed,
        "ms": None if speed is None else round(speed.ms[speed.form], 3),
    }
