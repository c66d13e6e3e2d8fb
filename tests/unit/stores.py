"""Stores of graphs, the graphs put into them, and processes that use one beside the test's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from warmgraph_backends.storing.canonical_json import sha256_hex
from warmgraph_backends.storing.graph_file import compress_payload
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store
from warmgraph_tools.by_path import ADOPT

from . import saved

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
