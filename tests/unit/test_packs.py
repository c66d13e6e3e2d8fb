"""Whose code something is, for people."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import pytest

from warmgraph_backends.code.packs import origin, owner_of

MINE = __name__.partition(".")[0]


def function(part: Any, **options: Any) -> None:
    """Somebody's."""


class Called:
    """An object that is called like a function."""

    def __call__(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "bound",
    [
        function,
        partial(function, 1),
        MethodType(function, 1),
        MethodType(partial(function, scale=2), 1),
        partial(MethodType(partial(partial(function), scale=2), 1), tau=3),
    ],
)
def test_a_function_is_its_packs_whatever_was_bound_to_it(bound: Any) -> None:
    assert owner_of(bound) == MINE
    assert origin(bound) == __name__


def test_an_object_is_of_its_classs_pack() -> None:
    assert owner_of(Called()) == owner_of(Called) == owner_of(partial(Called())) == MINE
