"""The console: keys that only verify, and the store that machines share."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.fleet.fleet import FAULT_FILE, Fleet
from warmgraph_backends.fleet.settings import FILE
from warmgraph_backends.storing.graph_file import compress_payload, file_name
from warmgraph_backends.target.keys import target

from . import saved
from .console import KEY, OTHER, RAW, run
from .stores import flip, key_number


class Machine:
    """Folders of a machine, and commands at its console."""

    def __init__(self, root: Path) -> None:
        self.root, self.private = root, root / "user" / "__warmgraph"
        self.private.mkdir(parents=True)

    def run(self, *words: str, status: int = 0) -> str:
        done = run(*words, "--base-directory", self.root)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def told(self, **content: object) -> None:
        (self.private / FILE).write_text(json.dumps(content), "utf-8")

    def put(self, key: str, **facts: object) -> Path:
        """Put a graph into its store, signed with what this machine signs with."""
        fleet = Fleet(self.private)
        store = fleet.store(self.root / "models" / "compiled_graphs", lambda: 1 << 30)
        here = {**target("cpu", backend_named("eager")), **facts}
        manifest = saved.manifest(key, target=here)
        return store.put(manifest, compress_payload(RAW))

    def has(self, key: str) -> bool:
        fleet = Fleet(self.private)
        store = fleet.store(self.root / "models" / "compiled_graphs", lambda: 1 << 30)
        return store.find(key) is not None and store.load(key) is not None


@pytest.fixture
def builder(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "builder")


@pytest.fixture
def runner(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "runner")


def test_a_fleet_is_set_up_as_the_page_says(
    builder: Machine, runner: Machine, tmp_path: Path
) -> None:
    """The whole way: a key, a bucket that one machine fills, and one that only runs."""
    url = (tmp_path / "bucket").as_uri()
    public = builder.run("key", "new", "fleet").splitlines()[-1]
    private = builder.private / "keys" / "fleet.private"
    if os.name == "posix":
        assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert private.read_text().strip() not in (builder.private / FILE).read_text()
    builder.put(KEY)
    builder.put(OTHER, torch="1.0.0")
    assert "2 sent, 0 were there, 0 not sent" in builder.run("push", url)
    assert "0 sent, 2 were there, 0 not sent" in builder.run("push", url)

    assert "0 taken" in runner.run("pull", url)  # nothing is trusted yet
    assert "signed with keys that are not trusted here" in runner.run("check-remote", url)
    assert "trusted: fleet" in runner.run("key", "trust", public)
    assert public in runner.run("key", "list")
    said = runner.run("check-remote", url)
    assert "fleet (" in said and "2 files, 1 fit this machine, 0 are here" in said
    assert f"1 x {saved.LABEL}: torch: made for 1.0.0, this machine has {torch.__version__}" in said
    assert "1 taken, 1 do not fit this machine, 0 refused" in runner.run("pull", url)
    assert runner.has(KEY) and not runner.has(OTHER)

    assert "no longer trusted: fleet" in runner.run("key", "revoke", "fleet")
    with pytest.raises(Exception, match="was signed with another key"):
        runner.has(KEY)
    assert "trusts no such key" in runner.run("key", "revoke", "fleet", status=2)


def test_explain_names_the_trusted_key_that_signed(builder: Machine, runner: Machine) -> None:
    public = builder.run("key", "new", "fleet").splitlines()[-1]
    path = builder.put(KEY)
    assert "signed: not by this machine" in runner.run("explain", str(path))
    runner.run("key", "trust", public)
    assert "signed: with the key fleet" in runner.run("explain", str(path))
    assert not (runner.private / "signing.key").exists()  # looking made none


def test_what_a_machine_signed_before_it_had_a_key_for_others_is_signed_anew_by_trust(
    builder: Machine, tmp_path: Path
) -> None:
    url, folder = (tmp_path / "bucket").as_uri(), builder.root / "models" / "compiled_graphs"
    builder.put(KEY)
    builder.run("key", "new", "fleet")
    assert builder.has(KEY)
    assert "0 sent, 0 were there" in builder.run("push", url)
    assert "1 compiled graphs trusted" in builder.run("trust", str(folder))
    assert "1 sent, 0 were there" in builder.run("push", url)
    assert "already trusted" in builder.run("trust", str(folder))


def test_a_wrong_key_or_name_is_refused_in_words(builder: Machine) -> None:
    assert "a public key must be NAME:64 hex digits" in builder.run("key", "trust", "x", status=2)
    assert "a key's name must be letters" in builder.run("key", "new", "../x", status=2)
    first = builder.run("key", "new", "one").splitlines()[-1]
    assert "no key is written over another" in builder.run("key", "new", "one", status=2)
    assert "this one signs nothing yet" in builder.run("key", "new", "two")
    builder.run("key", "trust", first)
    assert "already trusted" in builder.run("key", "trust", first)
    other = f"one:{'0a' * 32}"
    assert "another key is trusted as one" in builder.run("key", "trust", other, status=2)
    (builder.private / FILE).write_text("{", "utf-8")
    assert "it is no JSON" in builder.run("key", "trust", other, status=2)
    assert (builder.private / FILE).read_text() == "{"


def test_a_remote_that_cannot_be_had_is_told_without_its_secrets(
    runner: Machine, tmp_path: Path
) -> None:
    assert "name a URL" in runner.run("pull", status=2)
    assert "URL must begin with one of file://" in runner.run("push", "ftp://x", status=2)
    assert "a store at http:// can only be read" in runner.run("push", "http://x/y", status=2)
    secret = "http://me:hunter2@127.0.0.1:1/graphs"
    runner.told(remote=secret, patience_s=5)
    said = runner.run("check-remote", status=2)
    assert "http://127.0.0.1:1/graphs" in said and "hunter2" not in said
    runner.told(remote=(tmp_path / "bucket").as_uri(), mode="write")
    assert "written: yes" in runner.run("check-remote")
    assert list((tmp_path / "bucket").iterdir()) == []


def test_what_is_damaged_there_is_refused_and_the_rest_is_taken(
    builder: Machine, runner: Machine, tmp_path: Path
) -> None:
    url = (tmp_path / "bucket").as_uri()
    builder.put(KEY)
    builder.put(OTHER)
    builder.run("push", url)
    (runner.private / "signing.key").write_bytes((builder.private / "signing.key").read_bytes())
    (folder,) = (tmp_path / "bucket").glob("*/*")
    flip(folder / file_name(KEY), -1)
    (folder / file_name(key_number(3))).write_bytes(b"")
    said = runner.run("pull", url, status=1)
    assert "1 taken, 0 do not fit this machine, 2 refused" in said
    assert said.count("a file of the remote store is not used: ") == 2
    assert runner.has(OTHER) and not runner.has(KEY)


def test_a_region_of_another_comfyui_is_told_by_what_differs(
    builder: Machine, runner: Machine, tmp_path: Path
) -> None:
    url = (tmp_path / "bucket").as_uri()
    builder.put(KEY)
    builder.run("push", url)
    (runner.private / "signing.key").write_bytes((builder.private / "signing.key").read_bytes())
    fleet = Fleet(runner.private)
    store = fleet.store(runner.root / "models" / "compiled_graphs", lambda: 1 << 30)
    manifest = saved.manifest(OTHER, target=target("cpu", backend_named("eager")))
    manifest["structure"]["sources"] = {"comfy.some:Block.forward": "f" * 16}
    store.put(manifest, compress_payload(RAW))
    said = runner.run("check-remote", url)
    assert "code changed: comfy.some:Block.forward" in said and "0 fit this machine" in said


def test_the_doctor_names_remote_mode_keys_and_the_last_fault(runner: Machine) -> None:
    from warmgraph_console.fleet import fleet

    assert list(fleet(runner.private)) == []
    key = f"fleet:{'5f' * 32}"
    runner.told(remote="https://me:hunter2@host/graphs", trusted_keys=[key], mode="write")
    (runner.private / FAULT_FILE).write_text("2026-01-02 03:04:05 it failed\n", "utf-8")
    lines = {line.name: line for line in fleet(runner.private)}
    text = lines["remote store"].text
    assert "https://host/graphs, mode write" in text and "hunter2" not in text
    assert "last fault 2026-01-02 03:04:05 it failed" in text
    assert "a store at https:// can only be read" in text and not lines["remote store"].ok
    assert "trusts fleet (" in lines["keys"].text and lines["keys"].ok
    runner.told(remote=3)
    (line,) = fleet(runner.private)
    assert not line.ok and "remote must be text" in line.text
