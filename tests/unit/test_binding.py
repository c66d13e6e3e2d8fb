"""A call of a block is ours where its arguments mean what ours do, and else the host's own, as it
was made; no host's arguments raise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from warmgraph_backends.plans.binding import OPTIONAL, OR_NONE, TAKEN, Arguments, bound, needed

Call = tuple[tuple[Any, ...], dict[str, Any]]

#: As the host has it for a default.
EMPTY: dict[str, Any] = {}


#: What of them is ours.
ARGUMENTS = Arguments(x=TAKEN, e=TAKEN, freqs=OR_NONE, options=OR_NONE)


class Block:
    """Who computed a call, of what, and why."""

    def __init__(
        self, hosts: Callable[..., Any], arguments: Arguments = ARGUMENTS, serve: Any = None
    ) -> None:
        self.declined: list[str] = []
        serve = serve or (lambda *taken: ("ours", *taken))
        self.forward = bound(arguments, serve, partial(hosts, self), self.declined.append)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


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
    block, (args, kwargs) = Block(hosts, serve=lambda *_: None), call
    assert block(*args, **kwargs) == hosts(block, *args, **kwargs)


@pytest.mark.parametrize("call", [((), {}), ((1, 2, 3, 4, 5), {}), ((1, 2), {"hint": 3})])
def test_a_call_that_the_host_does_not_take_raises_what_it_would(call: Call) -> None:
    block, (args, kwargs) = Block(_as_known), call
    with pytest.raises(TypeError) as expected:
        _as_known(block, *args, **kwargs)
    with pytest.raises(TypeError) as raised:
        block(*args, **kwargs)
    assert str(raised.value) == str(expected.value)


def test_names_of_what_is_taken_by_its_place_are_not_compared() -> None:
    """Of a sort of layers each class may have a name of its own for what comes first."""
    arguments = Arguments("y", e=OR_NONE)
    block = Block(_as_known, arguments)
    assert block(1, 2) == block(1, e=2) == block(x=1, e=2) == ("ours", 1, 2)
    assert Block(_anything, arguments)(1, 2) == ("ours", 1, 2)
    assert Block(_less, arguments)(1) == ("ours", 1, None)


def _of_a_block(
    self: Any, x: Any, mask: Any, table: Any = None, t: Any = None, transformer_options: Any = EMPTY
) -> Any:
    return "host's", x, mask, table, t, transformer_options


USES = Arguments(
    x=TAKEN,
    mask="called with a mask",
    table=needed("called without a table"),
    t=OPTIONAL,
    ignored=None,
    transformer_options=OR_NONE,
)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (((1, None, 3), {}), (None, 1, 3)),
        (((1, None, 3, 4), {}), (None, 1, 3, 4)),
        (((1, None, 3, None), {}), (None, 1, 3)),
        (((1, None), {"table": 3, "transformer_options": 5}), (5, 1, 3)),
        (((1, 2, 3), {}), "called with a mask"),
        (((1,), {"mask": 2}), "called with a mask"),
        (((1, None), {}), "called without a table"),
        (((1, None, None), {}), "called without a table"),
    ],
)
def test_what_a_form_says_of_an_argument_becomes_of_it(call: Call, expected: Any) -> None:
    """The step's options come first of what is taken."""
    block, (args, kwargs) = Block(_of_a_block, USES), call
    for _ in range(2):  # as such a call is met, and as it is known
        result = block(*args, **kwargs)
        if isinstance(expected, str):
            assert result == _of_a_block(block, *args, **kwargs)
        else:
            assert result == ("ours", *expected)
    assert set(block.declined) == ({expected} if isinstance(expected, str) else set())


def test_what_says_nothing_to_us_is_not_looked_at() -> None:
    block = Block(lambda self, x, ignored=1, table=0: "host's", USES)
    assert block(1, 2, 3) == block(1, ignored=4, table=3) == ("ours", None, 1, 3)
    assert block(1, ignored=4) == "host's" and block.declined == ["called without a table"]


def test_more_ways_to_call_a_block_than_are_remembered_are_bound_all_the_same() -> None:
    block = Block(_some_by_name)
    for n in range(200):
        result = block(1, **{"e": 2, f"more_{n}": 3})
        assert result[0] == "host's" and block.declined.pop().endswith(f": more_{n}")
        assert block(1, e=2) == ("ours", 1, 2, None, None)


def test_what_ours_raises_passes() -> None:
    def serve(*_: Any) -> Any:
        raise TypeError("of ours")

    with pytest.raises(TypeError, match="of ours"):
        Block(_as_known, serve=serve)(1, 2)
