"""The models that tests of DeepCache share within a module."""

from __future__ import annotations

import pytest

from warmgraph_tools.inprocess import Host

from .cached import Pair


class Pairs(dict[str, Pair]):
    """A checkpoint of each kind with its prompts, loaded when a test asks for it."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def __missing__(self, kind: str) -> Pair:
        self[kind] = pair = Pair(self._host, kind)
        return pair


@pytest.fixture(scope="module")
def pairs(host: Host) -> Pairs:
    return Pairs(host)


@pytest.fixture
def xl(pairs: Pairs) -> Pair:
    return pairs["narrowxl"]


@pytest.fixture
def sd15(pairs: Pairs) -> Pair:
    return pairs["narrow15"]
