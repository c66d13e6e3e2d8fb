"""Commands of the console as tests run them, and machines and files for them."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from warmgraph_backends.storing.canonical_json import sha256_hex
from warmgraph_backends.storing.graph_file import file_name
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store
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


def planted(tmp_path: Path, data: bytes, key: str = KEY) -> tuple[Path, Path]:
    """Put one file into a folder; returns it and the user folder of a machine."""
    user = machine(tmp_path, "here")._signer.path.parents[1]
    return saved.put_at(tmp_path / "x.graphs" / file_name(key, hidden=True), data), user


def flip_last_bit(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    return bytes(data)
