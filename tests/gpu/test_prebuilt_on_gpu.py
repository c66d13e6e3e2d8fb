"""Graphs that were built without the card are the card's own: the same keys, right results, and
about its own graphs' speed.

They are built here, by a process that does not see the card. WARMGRAPH_PREBUILT names a folder in
its place, which another machine has filled with this Python and PyTorch:
`cli.py prebuild --target sm_90 --store FOLDER` for a checkpoint of SD1.5's layout, such as
`python -m dev.tools.checkpoints --name sd15.ckpt ... sd15` writes it.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("gpu")]
KIND, PREBUILT = "sd15", "WARMGRAPH_PREBUILT"
#: In fp16, of one region.
TOLERANCE = 5e-3


def _carried(lab: Any) -> str | None:
    """The graphs of another machine in a store of their own, trusted."""
    from warmgraph_backends.storing.graph_file import read_header
    from warmgraph_backends.storing.signing import Signer
    from warmgraph_console.graphs import trust

    if PREBUILT not in os.environ:
        return None
    files = sorted(Path(os.environ[PREBUILT]).glob("*.safetensors"))
    assert files, f"{PREBUILT} must name a folder of graph files, got {os.environ[PREBUILT]}"
    python = ".".join(platform.python_version_tuple()[:2])
    theirs = read_header(files[0]).read().target["python"]
    if theirs != python:
        pytest.skip(f"{PREBUILT} was filled by Python {theirs}, this is {python}")
    store = Path(lab.store("prebuilt_carried", empty=True))
    store.mkdir(parents=True)
    for file in files:
        shutil.copy2(file, store)
    private = store.with_name(store.name + "-private")
    private.mkdir(mode=0o700)
    assert trust(store, Signer(private)) == 0
    return str(store)


@pytest.fixture(scope="module")
def found(lab: Any) -> dict[str, Any]:
    import torch
    from warmgraph_benchmarks.prebuilt_case import TARGET, prebuilt_without_card

    here = "sm_{}{}".format(*torch.cuda.get_device_capability())
    if here != TARGET:
        pytest.skip(f"needs a card of {TARGET}, this is {here}")
    return prebuilt_without_card(lab, KIND, _carried(lab))


def test_the_keys_are_those_of_the_card(found: dict[str, Any]) -> None:
    """Of a store that was carried here, each key is looked up in it (`prebuilt_pairs`)."""
    assert found["same_keys"] and len(found["rows"]) == len(found["keys"]) > 1


def test_each_graph_computes_what_the_host_does(found: dict[str, Any]) -> None:
    errors = {name: row["rel_l2"] for name, row in found["rows"].items()}
    assert all(max(each.values()) < TOLERANCE for each in errors.values()), errors


def test_they_take_no_longer_than_those_that_were_built_on_the_card(found: dict[str, Any]) -> None:
    assert found["crossbuilt_ratio"] < 1.15, found["lines"]
