"""The console: trust signs what is intact and nothing else, explain and source say what a file is,
report what a server says.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers.registry import backend_named
from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.storing.canonical_json import sha256_hex
from warmgraph_backends.storing.graph_file import compress_payload, encode, file_name
from warmgraph_backends.storing.signing import KEY_FILE, Signer
from warmgraph_backends.storing.store import Store
from warmgraph_backends.target.keys import target
from warmgraph_tools.by_path import load

from . import saved

CLI = Path(__file__).resolve().parents[2] / "cli.py"
KEY, OTHER = sha256_hex("a graph"), sha256_hex("another graph")
RAW = b"the graph itself " * 500


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which has imported what a console would for half a second."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    before, words = list(sys.path), list(map(str, arguments))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = load("warmgraph_cli", CLI).main(words)
        except SystemExit as ended:
            status = ended.code
        finally:
            sys.path[:] = before
    said = []
    for stream in (out, err):
        stream.flush()
        said.append(stream.detach().getvalue().decode("utf-8"))
    return subprocess.CompletedProcess(words, status, *said)


def run_listing_imports(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command as at a console; stderr lists what Python imports."""
    command = [sys.executable, "-X", "importtime", str(CLI), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def machine(tmp_path: Path, name: str) -> Store:
    """Return the store of one machine, with a user folder and a signing key of its own."""
    private = tmp_path / name / "user" / "__warmgraph"
    (tmp_path / name / "user").mkdir(parents=True, exist_ok=True)
    return Store(
        tmp_path / name / "graphs", Signer(private), cap_bytes=lambda: 1 << 30, private=private
    )


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


def flip_last_bit(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    return bytes(data)


def test_a_copied_folder_loads_once_it_is_trusted(tmp_path: Path) -> None:
    folder, here = copied_folder(tmp_path), machine(tmp_path, "here")
    with pytest.raises(GraphFileError, match=r"cli\.py trust "):
        here.load(KEY, [folder])
    done = run("trust", folder, "--user-directory", tmp_path / "here" / "user")
    assert done.returncode == 0, done.stderr
    assert f"trusted: .{KEY}.safetensors (ResBlock 320->640)" in done.stdout
    assert "2 graphs trusted, 0 files refused" in done.stdout
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
    assert "refused: model.safetensors: its name is not a graph file's" in done.stdout
    assert "1 graphs trusted, 3 files refused" in done.stdout
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
        (["trust", tmp_path / "empty", "--user-directory", user], "no graph file"),
        (["trust", tmp_path, "--user-directory", tmp_path / "none"], "name it with --user-dir"),
        (["explain", tmp_path / "none", "--user-directory", user], "does not exist"),
        (["explain", tmp_path / "empty", "--user-directory", user], "no graph file"),
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
    assert "refused: compiled file" in done.stdout
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


def planted(tmp_path: Path, data: bytes, key: str = KEY) -> tuple[Path, Path]:
    """Put one file into a folder; returns it and the user folder of a machine."""
    user = machine(tmp_path, "here")._signer.path.parents[1]
    return saved.put_at(tmp_path / "x.graphs" / file_name(key, hidden=True), data), user


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


LEAN = "import torch\n\ndef call(args):\n    return (args[0],)  # \x1b[2J\u202e\n"
PARTS = {"source": LEAN, "triton": {}, "cpp": {"cpp_fused_0": b"library!"}}


def source_file(tmp_path: Path, parts: Any = PARTS) -> tuple[Path, Path, Path]:
    """Put a graph of another machine into a folder; returns it and both machines' user folders."""
    there = Signer(tmp_path / "other" / "__warmgraph")
    payload = compress_payload(pickle.dumps(parts, protocol=4))
    target = {"device": "cpu", "torch": "2.11.0", "backend": "inductor", "options": {"a": True}}
    path, user = planted(tmp_path, encode(saved.manifest(KEY, target=target), payload, there))
    return path, user, tmp_path / "other"


def test_source_prints_the_generated_code_and_what_the_file_says(tmp_path: Path) -> None:
    path, user, other = source_file(tmp_path)
    before = path.read_bytes()
    done = run_listing_imports("source", path, "--user-directory", user)
    assert done.returncode == 0, done.stderr
    assert " torch\n" not in done.stderr
    comments, _, code = done.stdout.partition("\n\n")
    assert all(line.startswith("# ") for line in comments.splitlines())
    for words in (
        "# ResBlock 320->640",
        f"# graph {KEY}",
        "# intact: yes",
        "# signed: not by this machine; if you trust where it came from, run at the server's ",
        f"cli.py trust {path.parent} --user-directory {user}",
        "# kernel cpp_fused_0: C++, 8 bytes",
    ):
        assert words in comments
    assert code == LEAN.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert path.read_bytes() == before
    assert not (user / "__warmgraph" / KEY_FILE).exists()
    there = run("source", path, "--user-directory", other)
    assert "# signed: by this machine" in there.stdout


class _Harmful:
    """Leaves a file behind where it is unpickled as any class would be."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize(
    ("backend", "words"),
    [("eager", "backend eager compiles nothing"), ("tensorrt", "backend must be one of")],
)
def test_source_of_a_backend_that_can_show_none_says_so(
    tmp_path: Path, backend: str, words: str
) -> None:
    target = {"device": "cpu", "torch": "2.11.0", "backend": backend}
    there = Signer(tmp_path / "other" / "__warmgraph")
    manifest = saved.manifest(KEY, target=target)
    path, user = planted(tmp_path, encode(manifest, compress_payload(b"bytes"), there))
    done = run("source", path, "--user-directory", user)
    assert done.returncode == 1 and words in done.stdout and not done.stderr


def test_source_runs_nothing_and_refuses_what_is_no_intact_graph(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    path, user, _ = source_file(tmp_path, {**PARTS, "cpp": {"x": _Harmful(mark)}})
    done = run("source", path, "--user-directory", user)
    assert done.returncode == 1
    assert "which no compiled file needs" in done.stdout
    assert not mark.exists()
    flip_last_bit(path)
    done = run("source", path, "--user-directory", user)
    assert done.returncode == 1
    assert "does not match its hash" in done.stdout
    assert "def call" not in done.stdout
    none = run("source", path.parent / "none", "--user-directory", user)
    assert (none.returncode, none.stdout.count("refused: none: ")) == (1, 1)
    folder = run("source", path.parent, "--user-directory", user)
    assert folder.returncode == 2
    assert "name one graph file" in folder.stderr


REPORT: dict[str, Any] = {
    "models": [{"text": "SDXL: 3 of 4 regions compiled\n  eager: 1 x \x1b[2Jpatched"}],
    "deepcaches": [{"text": "DeepCache, last run: 2 full"}],
    "builds": 3,
    "loads": 1,
    "building": {"done": 1, "total": 4, "paused": True},
    "store": {"files": 4, "bytes": 3 << 20},
    "stored": [
        {
            "title": "UNets",
            "files": 4,
            "bytes": 3 << 20,
            "last_used": 1_790_000_000,
            "unfit": [{"reason": "torch: made for 2.9", "files": 1, "bytes": 1}],
        }
    ],
    "warnings": [{"title": "No compiler", "text": "Get one.", "command": "apt install it"}],
    "runs": [
        {
            "at": 1_790_000_000,
            "model": "SDXL",
            "size": "1024x1024",
            "batch": 2,
            "steps": 20,
            "form": "compiled",
            "ms": ms,
            "eager_ms": eager,
        }
        for ms, eager in [*[(9.0, 9.0)] * 3, *[(31.25, 61.0)] * 8, (30.0, None), (None, None)]
    ],
    "settings": {"workers": 0},
}


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """A server that gives one answer to everything; yields its address and what was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def test_report_says_in_words_what_a_server_answers() -> None:
    with answering(json.dumps(REPORT).encode()) as (url, asked):
        done = run_listing_imports("report", "--url", url + "/")
        machine_readable = run("report", "--url", url, "--json")
    assert done.returncode == 0, done.stderr
    when = datetime.fromtimestamp(1_790_000_000).isoformat(" ")
    ran = "SDXL 1024x1024, batch 2, 20 steps, compiled"
    assert done.stdout.splitlines() == [
        "SDXL: 3 of 4 regions compiled",
        "  eager: 1 x \\x1b[2Jpatched",
        "DeepCache, last run: 2 full",
        "building 1 of 4 graphs (paused)",
        "this server: 3 graphs built, 1 loaded; store: 4 files, 3.0 MiB",
        f"  UNets: 4 files, 3.0 MiB, last used {when[:10]}; 1 do not fit here: torch: made for 2.9",
        "No compiler: Get one. apt install it",
        "last runs:",
        *[f"  {when}  {ran}: 31.2 ms a step (eager 61.0)"] * 8,
        f"  {when}  {ran}: 30.0 ms a step",
        f"  {when}  {ran}",
        "settings: workers 0",
    ]
    assert " torch\n" not in done.stderr
    assert json.loads(machine_readable.stdout) == REPORT
    assert asked == ["/warmgraph/report"] * 2


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 404, "has no Warmgraph; look for IMPORT FAILED in its log"),
        (b"", 500, "answers 500"),
        (b"<html>", 200, "is no server with Warmgraph"),
        (b"[]", 200, "is no server with Warmgraph (it is no report)"),
        (b"[" * 100_000, 200, "is no server with Warmgraph"),
        (b'{"models": [3]}', 200, "is another version's"),
    ],
)
def test_report_says_why_an_answer_is_none(body: bytes, status: int, words: str) -> None:
    with answering(body, status) as (url, _):
        done = run("report", "--url", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_report_says_that_what_speaks_no_http_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=speak, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = run("report", "--url", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no server answers at {url}" in done.stderr


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
        ("file:///etc/passwd", "must begin with http:// or https://"),
        ("localhost:8188", "is no server's address"),
        ("http://\x1b[2J", "\\x1b[2J"),
    ],
)
def test_report_without_a_server_says_so(url: str, words: str) -> None:
    done = run("report", "--url", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "cli.py report --url http://HOST:PORT" in done.stderr
    assert "\x1b" not in done.stderr


def test_the_page_for_developers_names_no_command_and_no_option_that_is_not_there() -> None:
    page = (CLI.parent / "docs" / "developers.md").read_text("utf-8")
    named = set(re.findall(r"cli\.py ([a-z]+)", page))
    commands = re.search(r"\{([a-z,]+)\}", run("--help").stdout)
    assert commands is not None
    assert set(commands[1].split(",")) == named
    options = set(re.findall(r"(--[a-z][a-z-]+)", page)) - {"--verbose"}  # the server's
    helps = "".join(run(command, "--help").stdout for command in ("doctor", "report"))
    assert options and all(option in helps for option in options)
    words = set(re.findall(r"^\| `([a-z-]+)(?:=KIND)?` \|", page, re.MULTILINE))
    assert words == {"verify", "only", "no-capture", "dump"}
