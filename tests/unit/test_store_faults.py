"""Files that are damaged or from elsewhere, and disks that refuse, do the store no harm."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.storing.files import put_in_place
from warmgraph_backends.storing.graph_file import Fault, RefusedFileError, file_name
from warmgraph_backends.storing.store import BROKEN, BROKEN_KEPT

from .stores import KEY, RAW, flip, key_number, make_store, put, start

# Damaged files


@pytest.mark.parametrize("damage", ["truncated", "empty", "payload", "manifest", "junk"])
def test_damaged_shared_file_is_moved_aside_and_replaced(tmp_path: Path, damage: str) -> None:
    store = make_store(tmp_path)
    path = put(store)
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-20])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "payload":
        flip(path, -5)
    elif damage == "manifest":
        path.write_bytes(data.replace(b"ResBlock", b"ResBlocK"))
    else:
        path.write_bytes(b"not a graph file at all")
    damaged = path.read_bytes()
    with pytest.raises(RefusedFileError) as caught:
        store.load(KEY)
    assert caught.value.fault is Fault.DAMAGED
    assert path.with_name(path.name + BROKEN).read_bytes() == damaged
    assert store.find(KEY) is None
    put(store)
    assert store.load(KEY) is not None


def test_good_copy_in_a_folder_serves_when_the_shared_file_is_damaged(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path = put(store)
    folder = tmp_path / "w.graphs"
    store.link(KEY, folder)
    flip(path, -5)
    graph = store.load(KEY, [folder])
    assert graph is not None
    assert graph.payload == RAW


def test_only_the_newest_broken_files_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for number in range(BROKEN_KEPT + 3):
        path = put(store, key_number(number))
        flip(path, -5)
        os.utime(path, (number, number))
        with pytest.raises(GraphFileError):
            store.read(path)
    kept = {path.name for path in store.root.glob(f"*{BROKEN}")}
    expected = {file_name(key_number(n)) + BROKEN for n in range(3, BROKEN_KEPT + 3)}
    assert kept == expected


def test_damaged_file_in_a_folder_is_left_and_replaced_by_the_next_link(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    put(store)
    folder = tmp_path / "w.graphs"
    store.link(KEY, folder)
    hidden = folder / f".{KEY}.safetensors"
    flip(hidden, -5)
    with pytest.raises(GraphFileError):
        store.read(hidden)
    assert os.listdir(folder) == [hidden.name]
    assert store.link(KEY, folder)
    assert store.read(hidden).payload == RAW


def test_half_written_files_of_a_dead_writer_do_no_harm(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path = put(store)
    old = store.root / f".{KEY}.safetensors.4711.0123abcd.tmp"
    new = store.root / f".{KEY}.safetensors.4711.0123abce.tmp"
    mine = store.root / ".notes.tmp"
    for draft in (old, new, mine):
        draft.write_bytes(path.read_bytes()[:100])
    yesterday = time.time() - 86400
    for draft in (old, mine):
        os.utime(draft, (yesterday, yesterday))
    assert store.load(KEY) is not None
    assert store.usage().files == 1
    assert store.evict() == []
    assert not old.exists()
    assert new.exists()  # its writer may be at work
    assert mine.exists()  # not one of ours


def test_file_replaced_while_a_damaged_one_was_read_is_not_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    path = put(store)
    good = path.read_bytes()
    flip(path, -5)
    from warmgraph_backends.storing import store as module

    real_read = module.read_graph

    def read_then_replace(*args: object) -> object:
        try:
            return real_read(*args)
        finally:
            put_in_place(path, lambda draft: draft.write_bytes(good) and None)

    monkeypatch.setattr(module, "read_graph", read_then_replace)
    with pytest.raises(RefusedFileError):
        store.read(path)
    monkeypatch.undo()
    assert store.read(path).payload == RAW


# Files from elsewhere


def test_file_signed_elsewhere_is_not_loaded_and_never_touched(tmp_path: Path) -> None:
    theirs, ours = make_store(tmp_path, user="other"), make_store(tmp_path)
    path = put(theirs)
    before = path.read_bytes(), path.stat().st_mtime_ns
    with pytest.raises(RefusedFileError) as caught:
        ours.load(KEY)
    assert caught.value.fault is Fault.UNTRUSTED
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_two_servers_with_own_keys_share_one_folder(tmp_path: Path) -> None:
    theirs, ours = make_store(tmp_path, user="other"), make_store(tmp_path)
    their_path = put(theirs)
    before = their_path.read_bytes()
    our_path = put(ours, raw=b"built again")
    assert our_path.parent.parent == ours.root
    assert their_path.read_bytes() == before
    for store, raw in ((theirs, RAW), (ours, b"built again")):
        graph = store.load(KEY)
        assert graph is not None
        assert graph.payload == raw
        assert store.usage().files == 2
    assert put(ours) == our_path
    assert ours.link(KEY, tmp_path / "w.graphs")


def test_intact_foreign_file_in_a_folder_stays(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    elsewhere = make_store(tmp_path / "elsewhere")
    put(store)
    put(elsewhere)
    folder = tmp_path / "w.graphs"
    elsewhere.link(KEY, folder)
    before = (folder / f".{KEY}.safetensors").read_bytes()
    assert not store.link(KEY, folder)
    assert (folder / f".{KEY}.safetensors").read_bytes() == before
    assert store.load(KEY, [folder]) is not None  # from the shared store


def test_untrusted_file_speaks_for_all_candidates(tmp_path: Path) -> None:
    store, elsewhere = make_store(tmp_path), make_store(tmp_path / "elsewhere")
    put(elsewhere)
    elsewhere.link(KEY, tmp_path / "w.graphs")
    path = put(store)
    flip(path, -5)
    with pytest.raises(RefusedFileError, match=r"cli\.py trust .*w\.graphs "):
        store.load(KEY, [tmp_path / "w.graphs"])


def test_file_put_into_a_folder_over_http_is_not_loaded_and_the_store_is_unharmed(
    tmp_path: Path,
) -> None:
    store = make_store(tmp_path)
    path = put(store)
    folder = tmp_path / "w.graphs"
    store.link(KEY, folder)
    hidden = folder / f".{KEY}.safetensors"
    put_in_place(hidden, lambda draft: draft.write_bytes(b"planted") and None)  # as the host does
    with pytest.raises(RefusedFileError):
        store.read(hidden)
    assert store.read(path).payload == RAW
    assert store.link(KEY, folder)
    assert store.read(hidden).payload == RAW


def test_file_overwritten_in_place_through_a_link_is_refused_in_the_store_as_well(
    tmp_path: Path,
) -> None:
    store = make_store(tmp_path)
    path = put(store)
    folder = tmp_path / "w.graphs"
    store.link(KEY, folder)
    with open(folder / f".{KEY}.safetensors", "r+b") as file:  # not the host's way, but `cp`'s
        file.write(b"planted")
    with pytest.raises(RefusedFileError):
        store.load(KEY, [folder])
    assert not path.exists()  # moved aside
    put(store)
    assert store.link(KEY, folder)
    assert store.load(KEY) is not None


def test_signed_file_under_another_name_is_refused_and_overwritten(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    other = key_number(1)
    shutil.copy(put(store), store.root / file_name(other))
    with pytest.raises(RefusedFileError) as caught:
        store.load(other)
    assert caught.value.fault is Fault.MISNAMED
    put(store, other, b"its own")
    graph = store.load(other)
    assert graph is not None
    assert graph.payload == b"its own"


# Disks that refuse


def test_root_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder should be")
    store = make_store(tmp_path)
    why = r"cannot be written: .*; free some space or make that folder writable$"
    with pytest.raises(GraphFileError, match=why):
        put(store)
    assert re.search(why, store.why_unwritable() or "")
    assert store.find(KEY) is None
    assert store.evict() == []


def test_a_look_at_a_root_that_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.why_unwritable() is None
    assert list(store.root.iterdir()) == []


def test_folder_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    put(store)
    (tmp_path / "file").write_text("")
    with pytest.raises(GraphFileError, match="cannot be written"):
        store.link(KEY, tmp_path / "file" / "w.graphs")
    assert store.load(KEY) is not None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on a file's size")
def test_disk_that_fills_up_while_writing_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path = put(store)
    before = path.read_bytes()
    code = """
import os, resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails part-way, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
for name in (key, "0" * 64):
    try:
        store.put({**manifest, "key": name}, compress_payload(os.urandom(100000)))
    except GraphFileError as error:
        print(error.reason.rpartition(": ")[2])
"""
    output, _ = start(code, tmp_path).communicate(timeout=60)
    assert output == "File too large\nFile too large\n"
    assert path.read_bytes() == before
    assert os.listdir(store.root) == [path.name]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows folders have no write bit")
def test_read_only_root_still_serves_what_it_has() -> None:
    base = Path(tempfile.mkdtemp())  # pytest's own folders shut out the account that root becomes
    try:
        store = make_store(base)
        path = put(store)
        for folder in (base, store.root, store.root.parent):
            folder.chmod(0o555)
        code = """
import os
store.usage(), store._signer.fingerprint
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
assert store.load(key).payload
assert store.evict() == []
for act in (lambda: store.put({**manifest, "key": "0" * 64}, compress_payload(b"x")),
            lambda: store.link(key, root / "w.graphs")):
    try:
        act()
    except GraphFileError as error:
        print(error.reason.rpartition(": ")[2])
"""
        output, _ = start(code, base).communicate(timeout=60)
        assert output == "Permission denied\nPermission denied\n"
        assert os.listdir(store.root) == [path.name]
    finally:
        for folder in (base, store.root, store.root.parent):
            folder.chmod(0o755)
        shutil.rmtree(base)


def test_without_a_signing_key_nothing_loads_and_the_reason_is_said(tmp_path: Path) -> None:
    path = put(make_store(tmp_path))
    (tmp_path / "blocked").write_text("")
    store = make_store(tmp_path, user="blocked")
    assert store.find(KEY) == path
    with pytest.raises(GraphFileError, match="signing key"):
        store.load(KEY)
    assert path.exists()
