"""Other processes, other hash seeds: the same keys, so the same graphs and not one build."""

from __future__ import annotations

import os
from typing import Any

import pytest

from warmgraph_tools.inprocess import Host

from .lab import Lab
from .probed import Probed
from .processes import seen_by

HASH_SEED = "12345"


@pytest.fixture(scope="module")
def child(lab: Lab, host: Host) -> dict[str, Any]:
    """What a new process with another hash seed saw over the shared store."""
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
    return seen_by("child.py", host.tree, host.base, lab.root, timeout=900, environment=environment)


def test_a_fresh_process_with_another_hash_seed_loads_everything_and_builds_nothing(
    child: dict[str, Any], probed: Probed
) -> None:
    assert child["hash"] != hash("warmgraph")
    keys = sorted(kind["key"] for kind in probed.report()["kinds"])
    assert child["keys"] == keys
    assert (child["builds"], child["loads"], child["eager"]) == (0, len(keys), 0)


def test_describing_sdxl_takes_little_of_the_hosts_time(child: dict[str, Any]) -> None:
    """Counted in calls of functions, of which there are as many on every machine: 441,000 with
    Python 3.11. A process's first time also imports, probes, and reads our own files: 999,000.
    """
    first, again = child["describe"]
    assert {(m["places"], m["kinds"]) for m in (first, again)} == {(114, 23)}
    assert again["calls"] <= 450_000 and first["calls"] <= 1_100_000, (first, again)
