"""The console's `source` prints the code in a graph's file, and runs none of it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.storing.graph_file import compress_payload, encode
from warmgraph_backends.storing.signing import KEY_FILE, Signer

from . import saved
from .console import KEY, flip_last_bit, planted, run, run_listing_imports

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
    assert "which no compiled graph needs" in done.stdout
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
    assert "name one compiled graph" in folder.stderr
