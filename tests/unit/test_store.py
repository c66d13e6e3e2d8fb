"""The store: what was put is found by every process; bad files do no harm, good ones stay."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.storing.canonical_json import sha256_hex
from warmgraph_backends.storing.files import put_in_place
from warmgraph_backends.storing.graph_file import (
    Fault,
    RefusedFileError,
    compress_payload,
    file_name,
)
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import BROKEN, BROKEN_KEPT, Store
from warmgraph_tools.by_path import ADOPT

from . import saved

ROOT = Path(__file__).resolve().parents[2]
KEY = sha256_hex("a graph")
RAW = b"the graph itself " * 500
PREAMBLE = """
import json, pathlib
from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.storing.graph_file import compress_payload
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store
root, private, key = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
manifest = json.loads(sys.argv[4])
store = Store(root, Signer(private), cap_bytes=lambda: 1 << 30, private=private)
"""


def make_store(
    tmp_path: Path, *, user: str = "user", cap: Callable[[], int] | None = None
) -> Store:
    """Return a store whose root is shared by all users of a test."""
    private = tmp_path / user / "__warmgraph"
    return Store(
        tmp_path / "models" / "compiled_graphs",
        Signer(private),
        cap_bytes=cap or (lambda: 1 << 30),
        private=private,
    )


def put(store: Store, key: str = KEY, raw: bytes = RAW) -> Path:
    return store.put(saved.manifest(key), compress_payload(raw))


def key_number(number: int) -> str:
    return sha256_hex(str(number))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.unlink()  # else a hard link of it would change as well
    path.write_bytes(data)


def start(code: str, tmp_path: Path) -> subprocess.Popen[str]:
    roots = [tmp_path / "models" / "compiled_graphs", tmp_path / "user" / "__warmgraph"]
    arguments = [*map(str, roots), KEY, json.dumps(saved.manifest(KEY))]
    return subprocess.Popen(
        [sys.executable, "-c", ADOPT + PREAMBLE + code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_was_put_is_found_and_read(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path = put(store)
    assert path == store.root / f"{KEY}.safetensors"
    assert store.find(KEY) == path
    assert store.read(path).payload == RAW
    graph = store.load(KEY)
    assert graph is not None
    assert graph.manifest.kind == saved.LABEL
    assert os.listdir(store.root) == [path.name]


def test_what_was_never_put_is_not_found(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.find(KEY) is None
    assert list(store.candidates(KEY, [tmp_path / "none.graphs"])) == []
    assert store.load(KEY) is None
    assert store.usage() == (0, 0)
    assert store.evict() == []
    assert not store.root.exists()


@pytest.mark.parametrize("key", ["../../x", "C:\\x", "", "é" * 64, KEY.upper(), KEY + "/"])
def test_only_a_key_becomes_a_path(tmp_path: Path, key: str) -> None:
    store = make_store(tmp_path)
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        store.find(key)
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        put(store, key)
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        store.link(key, tmp_path / "w.graphs")


def test_a_restart_with_the_same_user_directory_reads_it(tmp_path: Path) -> None:
    put(make_store(tmp_path))
    graph = make_store(tmp_path).load(KEY)
    assert graph is not None
    assert graph.payload == RAW


def test_shared_store_comes_before_folders(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path = put(store)
    folder = tmp_path / "w.graphs"
    assert store.link(KEY, folder)
    hidden = folder / f".{KEY}.safetensors"
    assert list(store.candidates(KEY, [folder])) == [path, hidden]
    path.unlink()
    assert store.find(KEY) is None
    assert list(store.candidates(KEY, [folder])) == [hidden]
    graph = store.load(KEY, [folder])
    assert graph is not None
    assert graph.path == hidden


def test_manifest_is_read_whoever_signed_it(tmp_path: Path) -> None:
    store, other = make_store(tmp_path), make_store(tmp_path, user="other")
    path = put(store)
    for reader in (store, other):
        manifest = reader.read_manifest(path)
        assert manifest is not None
        assert (manifest.key, manifest.kind) == (KEY, saved.LABEL)
        assert reader.read_manifest(path, kind="another") is None


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


# Links and copies


def test_link_takes_no_space_and_is_made_once(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path = put(store)
    folder = tmp_path / "workflows" / "w.graphs"
    assert store.link(KEY, folder)
    hidden = folder / f".{KEY}.safetensors"
    assert os.path.samefile(hidden, path)
    assert store.link(KEY, folder)
    assert os.listdir(folder) == [hidden.name]


def test_link_is_a_copy_where_hard_links_do_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    path = put(store)

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    folder = tmp_path / "w.graphs"
    assert store.link(KEY, folder)
    hidden = folder / f".{KEY}.safetensors"
    assert not os.path.samefile(hidden, path)
    assert store.read(hidden).payload == RAW
    before = hidden.stat().st_ino
    assert store.link(KEY, folder)
    assert hidden.stat().st_ino == before
    assert os.listdir(folder) == [hidden.name]


def test_link_of_what_the_store_lacks_makes_nothing(tmp_path: Path) -> None:
    assert not make_store(tmp_path).link(KEY, tmp_path / "w.graphs")
    assert not (tmp_path / "w.graphs").exists()


def test_damaged_file_is_never_linked(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    flip(put(store), -5)
    with pytest.raises(GraphFileError):
        store.link(KEY, tmp_path / "w.graphs")
    assert not (tmp_path / "w.graphs" / f".{KEY}.safetensors").exists()


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


# Several writers


def test_two_processes_put_the_same_graph_at_once(tmp_path: Path) -> None:
    code = """
print("ready", flush=True)
sys.stdin.readline()
for _ in range(60):
    path = store.put(manifest, compress_payload(b"the same" * 5000))
    assert store.read(path).payload == b"the same" * 5000
    assert store.link(key, root / "w.graphs")
print("done")
"""
    writers = [start(code, tmp_path) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.communicate(timeout=120)[0] for writer in writers] == ["done\n"] * 2
    store = make_store(tmp_path)
    assert sorted(os.listdir(store.root)) == [file_name(KEY), "w.graphs"]
    assert store.load(KEY) is not None


def test_threads_put_read_and_evict_at_once(tmp_path: Path) -> None:
    store = make_store(tmp_path, cap=lambda: 20_000)
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for turn in range(30):
                key = key_number((worker + turn) % 5)
                put(store, key, os.urandom(3000))
                try:
                    store.load(key)
                except RefusedFileError as error:  # another thread has just evicted it
                    assert error.fault is Fault.UNREADABLE
                store.evict()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    store.evict()
    assert store.usage().bytes <= 20_000
    assert list(store.root.glob(f"*{BROKEN}")) == []


# Eviction


def test_least_recently_used_go_first_until_the_rest_fits(tmp_path: Path) -> None:
    cap = 1 << 30
    store = make_store(tmp_path, cap=lambda: cap)
    paths = [put(store, key_number(number), os.urandom(2000)) for number in range(4)]
    for age, path in enumerate(paths):
        os.utime(path, (1000 + age, 1000 + age))
    store.read(paths[0])  # used again: now the newest
    assert store.evict() == []
    cap = store.usage().bytes - 1
    assert store.evict() == [key_number(1)]
    cap = paths[0].stat().st_size
    assert store.evict() == [key_number(2), key_number(3)]
    assert store.load(key_number(0)) is not None


def test_kept_keys_are_never_evicted(tmp_path: Path) -> None:
    store = make_store(tmp_path, cap=lambda: 0)
    for number in range(3):
        put(store, key_number(number))
    assert sorted(store.evict(keep=[key_number(1)])) == sorted([key_number(0), key_number(2)])
    assert store.find(key_number(1)) is not None


def test_files_of_workflow_folders_are_never_evicted(tmp_path: Path) -> None:
    store = make_store(tmp_path, cap=lambda: 0)
    put(store)
    inside, outside = store.root / "w.graphs", tmp_path / "w.graphs"
    assert store.link(KEY, inside)
    assert store.link(KEY, outside)
    assert store.evict() == [KEY]
    for folder in (inside, outside):
        assert (folder / f".{KEY}.safetensors").exists()
    graph = store.load(KEY, [outside])
    assert graph is not None
    assert graph.payload == RAW


def test_eviction_touches_nothing_but_graphs(tmp_path: Path) -> None:
    store = make_store(tmp_path, cap=lambda: 0)
    put(store)
    others = [store.root / "notes.txt", store.root / "model.safetensors", store.root / "sub" / "x"]
    (store.root / "sub").mkdir()
    for other in others:
        other.write_text("someone's")
    store.evict()
    assert all(other.exists() for other in others)
    assert store.usage() == (0, 0)


def test_usage_counts_files_and_bytes(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    sizes = [put(store, key_number(number)).stat().st_size for number in range(3)]
    assert store.usage() == (3, sum(sizes))


def test_eviction_and_usage_are_cheap_with_many_files(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.root.mkdir(parents=True)
    for number in range(500):
        (store.root / file_name(key_number(number))).write_bytes(b"x")
    seconds = []
    for _ in range(5):
        start_time = time.perf_counter()
        store.evict()
        store.usage()
        seconds.append(time.perf_counter() - start_time)
    assert min(seconds) < 0.25  # 10 ms on a quiet machine
