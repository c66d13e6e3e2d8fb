"""The signing key: one per directory, owner-only, the same for every process."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.storing import signing
from warmgraph_backends.storing.signing import KEY_FILE, Signer
from warmgraph_tools.by_path import ADOPT

ROOT = Path(__file__).resolve().parents[2]
RACER = """
import pathlib
from warmgraph_backends.storing.signing import Signer
signer = Signer(pathlib.Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(signer.sign("text"), flush=True)
"""


def test_the_command_that_trusts_a_folder_names_this_python_and_where_the_key_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer, folder = Signer(tmp_path / "user" / "__warmgraph"), tmp_path / "my graphs"
    words = shlex.split(signer.trust_command(folder))
    assert words[:3] == [sys.executable, str(ROOT / "cli.py"), "trust"]
    assert words[3:] == [str(folder), "--user-directory", str(tmp_path / "user")]
    monkeypatch.setattr(signing, "_USER", (tmp_path / "user").resolve())  # where it looks anyway
    assert shlex.split(signer.trust_command(folder)) == words[:4]


def test_verifies_only_what_it_signed(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    signature = signer.sign("a graph")
    assert signer.verify("a graph", signature)
    assert not signer.verify("a graph ", signature)
    assert not signer.verify("a graph", signature.upper())
    assert not signer.verify("a graph", "")
    assert not signer.verify("a graph", "é" * 64)


def test_keys_of_two_directories_differ(tmp_path: Path) -> None:
    one, other = Signer(tmp_path / "one"), Signer(tmp_path / "other")
    assert one.fingerprint != other.fingerprint
    assert not other.verify("text", one.sign("text"))


def test_fingerprint_is_short_and_gives_nothing_away(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    assert len(signer.fingerprint) == 8
    assert signer.fingerprint not in (tmp_path / KEY_FILE).read_text()


def test_key_survives_a_restart_and_can_be_copied(tmp_path: Path) -> None:
    signature = Signer(tmp_path / "one").sign("text")
    assert Signer(tmp_path / "one").verify("text", signature)
    (tmp_path / "other").mkdir()
    key = (tmp_path / "one" / KEY_FILE).read_text()
    (tmp_path / "other" / KEY_FILE).write_text(key + "\n")  # as an editor leaves it
    assert Signer(tmp_path / "other").verify("text", signature)


@pytest.mark.skipif(os.name != "posix", reason="Windows keeps access rights elsewhere")
def test_key_is_made_owner_only_and_kept_so(tmp_path: Path) -> None:
    directory = tmp_path / "private"
    Signer(directory).sign("text")
    assert (directory / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    (directory / KEY_FILE).chmod(0o644)
    Signer(directory).sign("text")
    assert (directory / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_nothing_but_the_key_is_left_in_the_directory(tmp_path: Path) -> None:
    Signer(tmp_path).sign("text")
    assert os.listdir(tmp_path) == [KEY_FILE]


@pytest.mark.parametrize("content", ["", "abc", "g" * 64, "0" * 66, "0" * 62 + "  "])
def test_damaged_key_is_refused_and_kept(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmgraph_backends.storing.signing._PATIENCE_S", 0.05)
    (tmp_path / KEY_FILE).write_text(content)
    with pytest.raises(GraphFileError, match=r"must be 64 hex digits.*restore it"):
        Signer(tmp_path).sign("text")
    assert (tmp_path / KEY_FILE).read_text() == content


def test_directory_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GraphFileError, match="make that folder writable"):
        Signer(tmp_path / "file" / "private").sign("text")


def test_a_key_that_cannot_be_read_is_told_from_a_folder_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    (tmp_path / KEY_FILE).mkdir()  # which nobody reads, whoever runs the tests
    with pytest.raises(GraphFileError, match="make that file readable"):
        Signer(tmp_path).sign("text")


def test_processes_that_start_together_share_one_key(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ADOPT + RACER, str(tmp_path / "private")]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    signatures = {racer.communicate(timeout=30)[0] for racer in racers}
    assert len(signatures) == 1
    assert os.listdir(tmp_path / "private") == [KEY_FILE]


FULL = """
import os, pathlib, resource, signal
from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.storing.signing import Signer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails part-way, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
if sys.argv[3] == "no links":
    def refuse(*_):
        raise OSError(1, "Operation not permitted")
    os.link = refuse
for _ in range(3):
    try:
        Signer(pathlib.Path(sys.argv[1])).sign("text")
    except GraphFileError as error:
        print(error.reason.rpartition(": ")[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(len(Signer(pathlib.Path(sys.argv[1])).sign("text")))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on a file's size")
@pytest.mark.parametrize("room", [0, 10])
@pytest.mark.parametrize("links", ["links", "no links"])
def test_a_disk_that_fills_up_leaves_no_part_of_a_key_and_later_there_is_one(
    tmp_path: Path, room: int, links: str
) -> None:
    private = tmp_path / "private"
    done = subprocess.run(
        [sys.executable, "-c", ADOPT + FULL, str(private), str(room), links],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["File too large"] * 3 + ["64"], done.stderr
    assert os.listdir(private) == [KEY_FILE]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on a file's size")
def test_a_disk_that_fills_up_while_the_key_itself_is_written_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where hard links do not work the key is written in place, after its draft had room."""

    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    def fill_up(descriptor: int) -> None:
        if os.path.exists(tmp_path / KEY_FILE):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", fill_up)
    with pytest.raises(GraphFileError, match="No space left"):
        Signer(tmp_path).sign("text")
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    Signer(tmp_path).sign("text")


def test_drafts_that_dead_processes_left_are_removed_and_fresh_ones_kept(tmp_path: Path) -> None:
    stale = tmp_path / f".{KEY_FILE}.123.0011aabb.tmp"
    fresh = tmp_path / f".{KEY_FILE}.124.0011aabb.tmp"
    for draft in (stale, fresh):
        draft.write_text("")
    os.utime(stale, (1000, 1000))
    Signer(tmp_path).sign("text")
    assert sorted(os.listdir(tmp_path)) == sorted([fresh.name, KEY_FILE])
