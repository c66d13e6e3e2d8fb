"""A call of a block is ours where its arguments mean what ours do, and else the host's own, as it
was made; no host's arguments raise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from warmgraph_backends.families.binding import HostsTurn, bound

Call = tuple[tuple[Any, ...], dict[str, Any]]

#: As the host has it for a default.
EMPTY: dict[str, Any] = {}


class Block:
    """Who computed a call, of what, and why."""

    def __init__(self, hosts: Callable[..., Any], make: Any = None) -> None:
        self.declined: list[str] = []
        make = make or _make
        self.forward = bound(make, partial(hosts, self), self.declined.append)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def _make(host: HostsTurn) -> Callable[..., Any]:
    def forward(x: Any, e: Any, freqs: Any = None, options: Any = None) -> Any:
        return host() if x == "decline" else ("ours", x, e, freqs, options)

    return forward


def _as_known(self: Any, x: Any, e: Any, freqs: Any = None, options: Any = EMPTY) -> Any:
    return "host's", x, e, freqs, options


def _one_more(
    self: Any, x: Any, e: Any, freqs: Any = None, options: Any = EMPTY, hint: Any = 1
) -> Any:
    return "host's", x, e, freqs, options, hint


def _between(self: Any, x: Any, hint: Any, e: Any, freqs: Any = None, options: Any = None) -> Any:
    return "host's", x, hint, e, freqs, options


def _moved(self: Any, e: Any, x: Any, freqs: Any = None, options: Any = None) -> Any:
    return "host's", e, x, freqs, options


def _optional_now(self: Any, x: Any, e: Any = 7, freqs: Any = None, options: Any = None) -> Any:
    return "host's", x, e, freqs, options


def _less(self: Any, x: Any, options: Any = None) -> Any:
    return "host's", x, options


def _anything(self: Any, *args: Any, **kwargs: Any) -> Any:
    return "host's", args, kwargs


def _some_by_name(self: Any, x: Any, **kwargs: Any) -> Any:
    return "host's", x, kwargs


#: What each host's forward is called with, and what is ours of that, or what the reason names.
CALLS: list[tuple[Callable[..., Any], Call, Any]] = [
    (_as_known, ((1, 2), {}), (1, 2, None, None)),
    (_as_known, ((1,), {"e": 2, "options": 4}), (1, 2, None, 4)),
    (_as_known, ((1, 2, 3, 4), {}), (1, 2, 3, 4)),
    (_one_more, ((1, 2, 3, 4), {}), (1, 2, 3, 4)),
    (_one_more, ((1, 2), {"hint": 1}), (1, 2, None, None)),
    (_one_more, ((1, 2, 3, 4, 1), {}), (1, 2, 3, 4)),
    (_one_more, ((1, 2), {"hint": 5}), "hint"),
    (_one_more, ((1, 2), {"hint": True}), "hint"),
    (_one_more, ((1, 2), {"hint": None}), "hint"),
    (_one_more, ((1, 2, 3, 4, 5), {}), "hint"),
    (_between, ((1, 2, 3), {}), "hint"),
    (_moved, ((1, 2), {}), (2, 1, None, None)),
    (_moved, ((), {"x": 1, "e": 2}), (1, 2, None, None)),
    (_optional_now, ((1,), {}), (1, 7, None, None)),
    (_less, ((1,), {}), "e"),
    (_less, ((1, 2), {}), "e"),
    (_anything, ((1, 2), {"freqs": 3}), (1, 2, 3, None)),
    (_anything, ((1, 2), {"freqs": 3, "hint": None}), "hint"),
    (_anything, ((1, 2, 3, 4, 5), {}), "*args"),
    (_anything, ((1,), {}), "e"),
    (_some_by_name, ((1,), {"e": 2, "options": 4}), (1, 2, None, 4)),
    (_some_by_name, ((1,), {"e": 2, "hint": 4, "more": 5}), "hint, more"),
]


@pytest.mark.parametrize(("hosts", "call", "expected"), CALLS)
def test_a_call_is_ours_where_it_means_the_same_and_else_the_hosts_and_named(
    hosts: Callable[..., Any], call: Call, expected: Any
) -> None:
    block = Block(hosts)
    args, kwargs = call
    result = block(*args, **kwargs)
    if isinstance(expected, str):
        assert result == hosts(block, *args, **kwargs), "as it was made"
        reason = f"called with other arguments than Warmgraph knows: {expected}"
        assert block.declined == [reason]
    else:
        assert result == ("ours", *expected) and block.declined == []


@pytest.mark.parametrize(("hosts", "call", "expected"), CALLS)
def test_what_ours_leaves_to_the_host_is_called_as_it_was(
    hosts: Callable[..., Any], call: Call, expected: Any
) -> None:
    block, (args, kwargs) = Block(hosts, _declining), call
    assert block(*args, **kwargs) == hosts(block, *args, **kwargs)


def _declining(host: HostsTurn) -> Callable[..., Any]:
    def forward(x: Any, e: Any, freqs: Any = None, options: Any = None) -> Any:
        return host()

    return forward


@pytest.mark.parametrize("call", [((), {}), ((1, 2, 3, 4, 5), {}), ((1, 2), {"hint": 3})])
def test_a_call_that_the_host_does_not_take_raises_what_it_would(call: Call) -> None:
    block, (args, kwargs) = Block(_as_known), call
    with pytest.raises(TypeError) as expected:
        _as_known(block, *args, **kwargs)
    with pytest.raises(TypeError) as raised:
        block(*args, **kwargs)
    assert str(raised.value) == str(expected.value)


def test_names_that_are_positional_only_are_not_compared() -> None:
    """Of a sort of layers each class may have a name of its own for what comes first."""

    def make(host: HostsTurn) -> Callable[..., Any]:
        def forward(y: Any, /, e: Any = None) -> Any:
            return "ours", y, e

        return forward

    block = Block(_as_known, make)
    assert block(1) == ("ours", 1, None), "it is not the host's to say what is needed"
    assert block(1, 2) == block(1, e=2) == block(x=1, e=2) == ("ours", 1, 2)
    assert Block(_anything, make)(1, 2) == ("ours", 1, 2)
    assert Block(_less, make)(1) == ("ours", 1, None)


def test_what_ours_raises_passes() -> None:
    def make(host: HostsTurn) -> Callable[..., Any]:
        def forward(x: Any, e: Any) -> Any:
            raise TypeError("of ours")

        return forward

    with pytest.raises(TypeError, match="of ours"):
        Block(_as_known, make)(1, 2)
