"""What the store holds is told by family, and what is cleared is what was said."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.sessions.inventory import UNUSED_DAYS, Inventory, What
from warmgraph_backends.storing.canonical_json import sha256_hex
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store
from warmgraph_backends.target import keys

from . import saved

FITS = keys.target("cpu", backend_named("eager"))


class Shelf:
    """A store with files of a test, and what of it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.store = self.of("user", folder)
        self.folder = folder
        self.loaded: set[str] = set()
        self.inventory = Inventory(self.store, lambda: self.loaded)

    @staticmethod
    def of(user: str, folder: Path) -> Store:
        private = folder / user
        private.mkdir(exist_ok=True)
        return Store(folder / "store", Signer(private), cap_bytes=lambda: 1 << 30, private=private)

    def put(self, name: str, *, family: str = "unet", days: float = 0, **changes: Any) -> str:
        key = sha256_hex(name)
        manifest = saved.manifest(key, **{"target": FITS, **changes})
        manifest["structure"]["family"] = family
        path = self.store.put(manifest, saved.packed())
        then = time.time() - days * 86400
        os.utime(path, (then, then))
        return key

    def names(self) -> set[str]:
        return {path.name.partition(".")[0] for path, _ in self.store.graphs()}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_files_are_told_by_family_with_size_and_last_use(shelf: Shelf) -> None:
    assert shelf.inventory.by_family() == []
    shelf.loaded = {shelf.put("one"), shelf.put("flux", family="flux", days=40)}
    shelf.put("two", days=2)
    shelf.put("three", days=UNUSED_DAYS + 1)
    unet, flux = shelf.inventory.by_family()
    size = unet["bytes"] // 3
    assert unet == {
        "family": "unet",
        "title": "UNets (SD1.5, SD2, SDXL, SVD)",
        "files": 3,
        "bytes": 3 * size,
        "last_used": pytest.approx(time.time(), abs=60),
        "in_use": 1,
        "unused_files": 1,
        "unused_bytes": size,
        "unfit": [],
    }
    assert flux["title"] == "Flux 1, Flux 2, Chroma, HunyuanVideo"
    assert flux["files"] == flux["in_use"] == 1
    assert flux["unused_files"] == 0, "it is loaded, however long ago its file was read"
    assert sum(each["bytes"] for each in (unet, flux)) == shelf.store.usage().bytes


def test_files_that_do_not_fit_this_machine_are_told_with_the_reason(
    shelf: Shelf, tmp_path: Path
) -> None:
    shelf.put("fits")
    shelf.put("older torch", target={**FITS, "torch": "2.9.1"})
    if not torch.cuda.is_available():
        shelf.put("gpu", target={**FITS, "device": "cuda"})
    shelf.put("compiler", target={**FITS, "backend": "magic"})
    elsewhere = Shelf.of("another", tmp_path)
    elsewhere.put(saved.manifest(sha256_hex("theirs"), target=FITS), saved.packed())
    (tmp_path / "store" / f"{sha256_hex('broken')}.safetensors").write_bytes(b"no graph")
    told = shelf.inventory.by_family()
    reasons = {each["reason"] for family in told for each in family["unfit"]}
    assert any(f"torch: made for 2.9.1, this machine has {torch.__version__}" in r for r in reasons)
    assert any("another key" in reason for reason in reasons)
    assert any("is damaged" in reason for reason in reasons)
    assert sum(each["files"] for family in told for each in family["unfit"]) == len(reasons)
    assert {family["title"] for family in told} == {"UNets (SD1.5, SD2, SDXL, SVD)", "Other files"}
    removed = shelf.inventory.clear(What.UNFIT)
    assert removed.files == len(reasons) and shelf.names() == {sha256_hex("fits")}


def test_unused_is_what_is_neither_loaded_nor_was_for_long(shelf: Shelf) -> None:
    new, loaded = shelf.put("new"), shelf.put("loaded", days=400)
    shelf.put("old", days=UNUSED_DAYS + 1)
    shelf.loaded = {loaded}
    before = shelf.store.usage()
    removed = shelf.inventory.clear(What.UNUSED)
    assert removed.files == 1 and shelf.names() == {new, loaded}
    assert shelf.store.usage().bytes == before.bytes - removed.bytes
    assert shelf.inventory.clear(What.UNUSED).files == 0


def test_all_leaves_what_lies_beside_workflows(shelf: Shelf, tmp_path: Path) -> None:
    key = shelf.put("one")
    shelf.put("two")
    workflow = tmp_path / "a.graphs"
    assert shelf.store.link(key, workflow)
    assert shelf.inventory.clear(What.ALL).files == 2
    assert shelf.names() == set() and shelf.inventory.by_family() == []
    assert shelf.store.load(key, [workflow]) is not None


def test_a_file_is_read_once_and_anew_when_it_is_another(shelf: Shelf) -> None:
    key = shelf.put("one")
    shelf.inventory.by_family()
    path = shelf.store.find(key)
    assert path is not None
    shelf.store.read_manifest = None  # type: ignore[method-assign, assignment]  # not asked again
    assert shelf.inventory.by_family()[0]["family"] == "unet"
    path.unlink()
    assert shelf.inventory.by_family() == []
