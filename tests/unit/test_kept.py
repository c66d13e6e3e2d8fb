"""The doctor's look at what a machine keeps: whose files, whose key, how much room."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from warmgraph_backends.cleanup import owners, temporary
from warmgraph_backends.storing.canonical_json import sha256_hex
from warmgraph_backends.storing.graph_file import compress_payload, file_name
from warmgraph_backends.storing.signing import KEY_FILE, Signer
from warmgraph_backends.storing.store import Store
from warmgraph_console.kept import beside_workflows, leftovers, signing_key, store
from warmgraph_console.line import Line

from . import saved

KEY, OTHER = sha256_hex("a graph"), sha256_hex("another graph")


class Machine:
    """A base folder with a user folder, a store and a signing key of its own."""

    def __init__(self, base: Path) -> None:
        self.user, self.root = base / "user", base / "models" / "compiled_graphs"
        self.private = self.user / "__warmgraph"
        self.private.mkdir(parents=True)
        signer = Signer(self.private)
        self.store = Store(self.root, signer, cap_bytes=lambda: 1 << 30, private=self.private)

    def put(self, key: str) -> Path:
        return self.store.put(saved.manifest(key), compress_payload(b"a graph" * 100))

    def lines(self) -> dict[str, Line]:
        return {line.name: line for line in store(self.root, self.user)}

    def beside(self) -> list[Line]:
        return list(beside_workflows(self.user))


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "there")


def test_a_machine_that_has_built_is_well(here: Machine) -> None:
    here.put(KEY)
    lines = here.lines()
    assert lines["store"].ok
    assert f"{here.root}: 1 compiled graphs, 0.0 MiB of at most 4.0 GiB; " in lines["store"].text
    assert lines["files of the store"] == (
        "files of the store",
        True,
        "all 1 are signed by this machine",
    )
    key = signing_key(here.user)
    assert key.ok
    assert Signer(here.private).fingerprint in key.text


def test_a_fresh_machine_is_well_and_stays_as_it_is(tmp_path: Path) -> None:
    user = tmp_path / "user"
    user.mkdir()
    (line,) = store(tmp_path / "models" / "graphs", user)
    assert line.ok
    assert "not there yet, the first compiled graph makes it" in line.text
    assert signing_key(user).ok
    assert list(tmp_path.rglob("*")) == [user]


def test_files_of_another_key_are_counted_in_the_store_and_beside_workflows(
    here: Machine, there: Machine
) -> None:
    here.put(KEY)
    there.put(OTHER)
    assert there.store.link(OTHER, here.user / "default" / "workflows" / "copied.graphs")
    shutil.copy(there.root / file_name(OTHER), here.root)
    before = {path: path.read_bytes() for path in here.root.rglob("*.safetensors")}
    line = here.lines()["files of the store"]
    assert not line.ok
    assert line.text == (
        "this machine did not sign 1 of them, and never loads those; `python cli.py trust FOLDER` "
        f"if you trust where they came from: {here.root}"
    )
    (beside,) = here.beside()
    assert not beside.ok
    assert str(here.user / "default" / "workflows" / "copied.graphs") in beside.text
    assert {path: path.read_bytes() for path in here.root.rglob("*.safetensors")} == before


def test_a_store_that_servers_with_own_keys_share_is_well(here: Machine, there: Machine) -> None:
    there.put(KEY)
    here.root.mkdir(parents=True)
    shutil.copy(there.root / file_name(KEY), here.root)
    assert not here.lines()["files of the store"].ok
    here.put(KEY)  # into its own folder, for the place is taken
    assert here.lines()["files of the store"].ok


def test_without_a_key_all_files_are_foreign_and_none_is_made(here: Machine) -> None:
    here.put(KEY)
    (here.private / KEY_FILE).unlink()
    assert "did not sign 1 of them" in here.lines()["files of the store"].text
    assert signing_key(here.user).ok
    assert not (here.private / KEY_FILE).exists()


def test_a_file_that_is_no_graph_is_named(here: Machine) -> None:
    path = here.put(KEY)
    path.write_bytes(b"nothing")
    line = here.lines()["files of the store"]
    assert not line.ok
    assert f"1 of them are not whole, such as {path}; delete them" in line.text


def test_a_broken_key_is_told_once(here: Machine) -> None:
    here.put(KEY)
    (here.private / KEY_FILE).write_text("not a key that anybody made, and too long for one " * 2)
    key = signing_key(here.user)
    assert not key.ok
    assert "must be 64 hex digits" in key.text
    assert set(here.lines()) == {"store"}


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such permissions")
def test_a_key_that_others_can_read_is_told_and_left_as_it_is(here: Machine) -> None:
    here.put(KEY)
    path = here.private / KEY_FILE
    path.chmod(0o644)
    key = signing_key(here.user)
    assert not key.ok
    assert f"`chmod 600 {path}`" in key.text
    assert set(here.lines()) == {"store"}
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_store_in_the_place_of_a_file_cannot_be_written(here: Machine) -> None:
    here.root.parent.mkdir(parents=True)
    here.root.write_text("in the way")
    (line,) = store(here.root / "graphs", here.user)
    assert not line.ok
    assert f"{here.root} cannot be written; " in line.text


def test_what_a_killed_process_left_is_counted(
    here: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert leftovers(here.user) == ("leftovers", True, "none")
    gone = owners.me()._replace(start=owners.me().start + 1)
    if owners.life(gone) is not owners.Life.ENDED:
        pytest.skip("this system does not tell whether a process has ended")
    (tmp_path / f"warmgraph-worker-{gone}-abcdefgh").mkdir()
    temporary.make("worker")  # of this process, which lives
    line = leftovers(here.user)
    assert line.ok
    assert line.text.startswith("1 of processes that were killed")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seen on Linux only")
def test_programs_of_a_killed_server_need_the_user(
    here: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = owners.me()._replace(start=owners.me().start + 1)
    folder = tmp_path / f"warmgraph-worker-{gone}-abcdefgh"
    folder.mkdir()
    environment = {**os.environ, "WARMGRAPH_WORKER": str(folder)}
    program = [sys.executable, "-c", "print(flush=True); input()"]
    left = subprocess.Popen(program, env=environment, stdin=-1, stdout=-1)
    try:
        assert left.stdout is not None
        left.stdout.readline()  # its environment can be read from then on
        line = leftovers(here.user)
    finally:
        left.communicate()
    assert not line.ok
    assert f"1 programs of servers that have ended still run ({left.pid} ...)" in line.text
