"""The console: `trust` signs what is intact and nothing else, `explain` says what a file is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.storing.graph_file import compress_payload, encode, file_name
from warmgraph_backends.storing.signing import KEY_FILE, Signer
from warmgraph_backends.target.keys import target

from . import saved
from .console import CLI, KEY, OTHER, RAW, flip_last_bit, machine, planted, run, run_listing_imports


def copied_folder(tmp_path: Path, facts: dict[str, object] | None = None) -> Path:
    """Return a `NAME.graphs` that came from another machine."""
    there, folder = machine(tmp_path, "there"), tmp_path / "My Flow.graphs"
    for key in (KEY, OTHER):
        manifest = saved.manifest(
            key,
            target=facts or {"torch": "2.11.0", "device": "cpu", "backend": "eager"},
            built={"seconds": 12.5, "phases": {}, "date": "2026-08-24"},
        )
        there.put(manifest, compress_payload(RAW))
        assert there.link(key, folder)
    return folder


def test_a_copied_folder_loads_once_it_is_trusted(tmp_path: Path) -> None:
    folder, here = copied_folder(tmp_path), machine(tmp_path, "here")
    with pytest.raises(GraphFileError, match=r"cli\.py trust "):
        here.load(KEY, [folder])
    done = run("trust", folder, "--user-directory", tmp_path / "here" / "user")
    assert done.returncode == 0, done.stderr
    assert f"trusted: .{KEY}.safetensors (ResBlock 320->640)" in done.stdout
    assert "2 compiled graphs trusted, 0 files refused" in done.stdout
    for key in (KEY, OTHER):
        graph = machine(tmp_path, "here").load(key, [folder])
        assert graph is not None
        assert graph.payload == RAW
        assert graph.manifest.build_seconds == 12.5
    assert sorted(os.listdir(folder)) == sorted(file_name(key, hidden=True) for key in (KEY, OTHER))
    again = run("trust", folder, "--base-directory", tmp_path / "here")
    assert again.stdout.count("already trusted: ") == 2


def test_trust_does_not_reach_through_links_into_the_other_store(tmp_path: Path) -> None:
    folder = copied_folder(tmp_path)
    here = machine(tmp_path, "here")
    done = run("trust", folder, "--user-directory", tmp_path / "here" / "user")
    assert done.returncode == 0, done.stderr
    assert here.load(KEY, [folder]) is not None
    assert machine(tmp_path, "there").load(KEY) is not None  # was one file with the folder's


def test_trust_refuses_what_is_not_an_intact_graph(tmp_path: Path) -> None:
    folder, here = copied_folder(tmp_path), machine(tmp_path, "here")
    path = folder / file_name(KEY, hidden=True)
    renamed = folder / file_name("0" * 64, hidden=True)
    renamed.write_bytes(path.read_bytes())
    (folder / "model.safetensors").write_bytes(path.read_bytes())
    (folder / "notes.txt").write_text("not a graph")
    damaged = flip_last_bit(path)
    done = run("trust", folder, "--user-directory", tmp_path / "here" / "user")
    assert done.returncode == 1
    assert f"refused: {path.name}: " in done.stdout
    assert "does not match its hash" in done.stdout
    assert "which is not what its name says" in done.stdout
    assert "refused: model.safetensors: its name is not a compiled graph's" in done.stdout
    assert "1 compiled graphs trusted, 3 files refused" in done.stdout
    assert path.read_bytes() == damaged
    for key in (KEY, "0" * 64):
        with pytest.raises(GraphFileError):
            here.load(key, [folder])
    assert here.load(OTHER, [folder]) is not None


@pytest.mark.skipif(sys.platform == "win32", reason="making a link needs rights on Windows")
def test_trust_refuses_links_that_lead_out(tmp_path: Path) -> None:
    folder = copied_folder(tmp_path)
    machine(tmp_path, "here")
    outside = tmp_path / "outside"
    path = folder / file_name(KEY, hidden=True)
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    before = outside.read_bytes()
    done = run("trust", folder, "--user-directory", tmp_path / "here" / "user")
    assert done.returncode == 1
    assert "it is a link that leads out of" in done.stdout
    assert path.is_symlink()
    assert outside.read_bytes() == before


def test_wrong_calls_say_what_is_wrong(tmp_path: Path) -> None:
    machine(tmp_path, "here")
    user = tmp_path / "here" / "user"
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        (["trust", tmp_path / "none", "--user-directory", user], "is not a folder"),
        (["trust", tmp_path / "empty", "--user-directory", user], "no compiled graph in"),
        (["trust", tmp_path, "--user-directory", tmp_path / "none"], "name it with --user-dir"),
        (["explain", tmp_path / "none", "--user-directory", user], "does not exist"),
        (["explain", tmp_path / "empty", "--user-directory", user], "no compiled graph in"),
        ([], "required"),
    ):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert words in done.stderr


def test_explain_says_what_a_file_is_and_changes_nothing(tmp_path: Path) -> None:
    facts = target("cpu", backend_named("eager"))
    folder = copied_folder(tmp_path, facts)
    machine(tmp_path, "here")
    path = folder / file_name(KEY, hidden=True)
    before = path.read_bytes()
    done = run("explain", path, "--user-directory", tmp_path / "here" / "user")
    assert done.returncode == 0, done.stderr
    for words in (
        "kind: ResBlock 320->640",
        "seconds 12.5",
        f"torch {torch.__version__}",
        "signed: not by this machine; `python cli.py trust FOLDER` trusts it",
        "intact: yes",
        "fits this machine",
        f'"key": "{KEY}"',
    ):
        assert words in done.stdout
    assert path.read_bytes() == before
    assert not (tmp_path / "here" / "user" / "__warmgraph" / KEY_FILE).exists()
    there = run("explain", folder, "--user-directory", tmp_path / "there" / "user")
    assert there.stdout.count("signed: by this machine") == 2


def test_explain_says_why_a_file_does_not_fit(tmp_path: Path) -> None:
    facts = {**target("cpu", backend_named("eager")), "torch": "2.99.0"}
    folder = copied_folder(tmp_path, facts)
    flip_last_bit(folder / file_name(OTHER, hidden=True))
    done = run("explain", folder, "--user-directory", tmp_path / "there" / "user")
    assert done.returncode == 1
    words = f"does not fit: torch: made for 2.99.0, this machine has {torch.__version__}"
    assert done.stdout.count(words) == 1
    assert "refused: compiled graph" in done.stdout
    assert "does not match its hash" in done.stdout


def test_explain_says_that_another_version_of_ours_made_a_file(tmp_path: Path) -> None:
    older = {**target("cpu", backend_named("inductor")), "payload": 4}
    del older["warmgraph"]
    folder = copied_folder(tmp_path, older)
    for flags in ([], ["--fit"]):
        done = run("explain", *flags, folder, "--user-directory", tmp_path / "there" / "user")
        assert done.returncode == 0, done.stderr
        lines = [line.strip() for line in done.stdout.splitlines() if " fit" in line]
        assert lines == ["does not fit: made by another version of Warmgraph"] * 2


def test_text_from_a_file_cannot_play_tricks_on_the_console(tmp_path: Path) -> None:
    there, folder = machine(tmp_path, "there"), tmp_path / "x.graphs"
    there.put(saved.manifest(KEY), compress_payload(RAW))
    there.link(KEY, folder)
    path = folder / file_name(KEY, hidden=True)
    odd = saved.changed(
        path.read_bytes(), lambda m: m.update(kind="\x1b[2Jx\nsigned\u202e"), there._signer
    )
    path.unlink()
    path.write_bytes(odd)
    (folder / "\x1b[2J.safetensors").write_bytes(b"")
    done = run("explain", folder, "--user-directory", tmp_path / "there" / "user")
    assert "\x1b" not in done.stdout + done.stderr
    assert "\u202e" not in done.stdout
    assert "kind must be printable text" in done.stdout
    assert "'\\x1b[2Jx\\nsigned\\u202e'" in done.stdout


def test_it_runs_from_any_folder_and_finds_the_user_folder_beside_custom_nodes(
    tmp_path: Path,
) -> None:
    folder, here = copied_folder(tmp_path), machine(tmp_path, "here")
    (tmp_path / "here" / "custom_nodes").mkdir()
    pack = tmp_path / "here" / "custom_nodes" / "warmgraph"
    pack.symlink_to(CLI.parent, target_is_directory=True)
    command = [sys.executable, str(pack / "cli.py"), "trust", folder.name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, timeout=120)
    assert done.returncode == 0, done.stderr
    assert here.load(KEY, [folder]) is not None


def good(tmp_path: Path, **changes: Any) -> bytes:
    manifest = saved.manifest(KEY, **changes)
    return encode(manifest, compress_payload(RAW), Signer(tmp_path / "other"))


def both(path: Path, user: Path) -> list[subprocess.CompletedProcess[str]]:
    """Trust the folder of a file, and explain the file and its folder."""
    calls = (["trust", path.parent], ["explain", path], ["explain", path.parent])
    return [run(*call, "--user-directory", user) for call in calls]


SURROGATE = '{"key": "\ud800"}'
DEEP = "[" * 20_000
STRANGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a lone surrogate": lambda m: m["target"].update(torch="\ud800"),
    "a list for a table": lambda m: m.update(target=["x"]),
    "control characters": lambda m: m["built"].update(date="\x1b[2J\x7f\u202e"),
    "control characters in a name": lambda m: m["target"].update({"\x1b]0;x\x07": 1}),
    "a key that is none": lambda m: m.update(key="\x1b[2J" * 9),
    "a format that is text": lambda m: m.update(format="\x1b[2J"),
    "gigabytes when unpacked": lambda m: m["payload"].update(raw_bytes=8 << 30),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_a_strange_manifest_is_refused_in_one_line(tmp_path: Path, strange: str) -> None:
    path, user = planted(tmp_path, saved.changed(good(tmp_path), STRANGE[strange], None))
    for done in both(path, user):
        shown = done.stdout + done.stderr
        assert done.returncode == 1, shown
        assert shown.count("refused: ") == 1
        assert not {"\x1b", "\x07", "\x7f", "\u202e"}.intersection(shown)


@pytest.mark.parametrize("text", [SURROGATE, DEEP, "\ud800"], ids=["surrogate", "deep", "raw"])
def test_a_manifest_that_is_no_json_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path, user = planted(tmp_path, saved.with_text(good(tmp_path), text, None))
    for done in both(path, user):
        assert done.returncode == 1
        assert done.stdout.count("refused: ") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="a file with holes is large there")
def test_a_file_that_claims_a_terabyte_is_refused_unread(tmp_path: Path) -> None:
    """Reading it takes longer than a command may."""
    container, _, _ = saved.opened(good(tmp_path))
    size = 1 << 40
    container["payload"] = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    path, user = planted(tmp_path, saved.closed(container, b""))
    os.truncate(path, path.stat().st_size + size)
    for done in both(path, user):
        assert done.returncode == 1
        assert f"cannot be {size} bytes long" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="making a link needs rights on Windows")
def test_links_in_a_circle_are_refused_in_words(tmp_path: Path) -> None:
    path, user = planted(tmp_path, b"")
    path.unlink()
    path.symlink_to(path.name)
    for done in both(path, user):
        assert done.returncode == 1
        assert done.stdout.count("refused: ") == 1
    circle = tmp_path / "circle"
    circle.symlink_to(circle.name)
    for command in ("trust", "explain"):
        done = run(command, circle, "--user-directory", user)
        assert done.returncode in (1, 2)
        done = run(command, path.parent, "--user-directory", circle)
        assert done.returncode == 2


def test_names_that_no_console_shows_are_written_out(tmp_path: Path) -> None:
    user = planted(tmp_path, good(tmp_path))[1]
    folder = tmp_path / "x\x1b[2J.graphs"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no such names here")
    for call in (["trust", folder], ["explain", folder], ["explain", folder / "none"]):
        done = run(*call, "--user-directory", user)
        assert done.returncode == 2
        assert "\x1b" not in done.stdout + done.stderr
        assert "\\x1b[2J" in done.stderr


def test_explain_and_trust_do_without_pytorch_unless_it_is_asked_for(tmp_path: Path) -> None:
    facts = target("cpu", backend_named("inductor"))
    path, user = planted(tmp_path, good(tmp_path, target=facts))
    for call in (["trust", path.parent], ["explain", path], ["explain", path, "--fit"]):
        done = run_listing_imports(*call, "--user-directory", user)
        assert done.returncode == 0, done.stderr
        assert (" torch\n" in done.stderr) is ("--fit" in call)
        assert ("fits this machine" in done.stdout) is (call[0] == "explain")


def test_the_page_for_developers_names_no_command_and_no_option_that_is_not_there() -> None:
    page = (CLI.parent / "docs" / "developers.md").read_text("utf-8")
    named = set(re.findall(r"cli\.py ([a-z-]+)", page))
    commands = re.search(r"\{([a-z,-]+)\}", run("--help").stdout)
    assert commands is not None
    assert set(commands[1].split(",")) == named
    options = set(re.findall(r"(--[a-z][a-z-]+)", page)) - {
        *("--verbose", "--front-end-root"),  # the server's
    }
    helps = "".join(
        run(command, "--help").stdout for command in ("doctor", "report", "learn", "prebuild")
    )
    dev = [sys.executable, CLI.parent / "dev", "test", "--help"]
    helps += subprocess.run(dev, capture_output=True, text=True, check=True).stdout
    assert options and all(option in helps for option in options)
    words = set(re.findall(r"^\| `([a-z-]+)(?:=KIND)?` \|", page, re.MULTILINE))
    assert words == {"verify", "only", "no-capture", "dump"}
