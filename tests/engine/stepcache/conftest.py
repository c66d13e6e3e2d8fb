"""The models that tests of Step Cache share within a module."""

from __future__ import annotations

import pytest

from warmgraph_tools.inprocess import Host

from ..deepcache.cached import Pair


@pytest.fixture(scope="module")
def xl(host: Host) -> Pair:
    return Pair(host, "narrowxl")
