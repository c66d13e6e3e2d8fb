"""The graph of int8 products: one for all sizes and all models, built, stored and loaded like the
graph of any kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .int8_graph import SIZES, seen
from .lab import Lab, lab_of_its_own
from .processes import seen_by

DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def products(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    yield from lab_of_its_own("products", tmp_path_factory)


def test_a_worker_builds_it_and_a_new_process_loads_it(products: Lab, host: Host) -> None:
    """One for each dtype of results; sums are exact at any size."""
    built = {name: seen(products, getattr(torch, name), build=True) for name in DTYPES}
    assert [each["source"] for each in built.values()] == ["built"] * 2
    loaded = seen_by("int8_child.py", host.tree, host.base, products.root, *DTYPES, timeout=300)
    for name in DTYPES:
        assert loaded[name]["source"] == "loaded" and loaded[name]["key"] == built[name]["key"]
        assert loaded[name]["builds"] == 0
        for each in (built[name], loaded[name]):
            assert len(each["errors"]) == len(SIZES) and max(each["errors"]) <= 1e-6, each
    assert built["float32"]["key"] != built["bfloat16"]["key"]
