"""The graph of int8 products: one for all sizes and all models, built, stored and loaded like the
graph of any kind.
"""

from __future__ import annotations

import torch

from warmgraph_tools.inprocess import Host

from .int8_graph import SIZES, seen
from .lab import Lab
from .processes import seen_by

DTYPES = ("float32", "bfloat16")


def test_a_worker_builds_it_and_a_new_process_loads_it(own_lab: Lab, host: Host) -> None:
    """One for each dtype of results; sums are exact at any size."""
    built = {name: seen(own_lab, getattr(torch, name), build=True) for name in DTYPES}
    assert [each["source"] for each in built.values()] == ["built"] * 2
    loaded = seen_by("int8_child.py", host.tree, host.base, own_lab.root, *DTYPES, timeout=300)
    for name in DTYPES:
        assert loaded[name]["source"] == "loaded" and loaded[name]["key"] == built[name]["key"]
        assert loaded[name]["builds"] == 0
        for each in (built[name], loaded[name]):
            assert len(each["errors"]) == len(SIZES) and max(each["errors"]) <= 1e-6, each
    assert built["float32"]["key"] != built["bfloat16"]["key"]
