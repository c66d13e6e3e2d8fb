"""The store: what was put is found by every process, and what was unused for longest goes first."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.storing.graph_file import Fault, RefusedFileError, file_name
from warmgraph_backends.storing.store import BROKEN

from . import saved
from .stores import KEY, RAW, flip, key_number, make_store, put, start


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
