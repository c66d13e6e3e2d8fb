"""A process with a remote store: it ends whatever hangs, and imports what was asked for alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from warmgraph_tools.by_path import ADOPT

CLIENTS = ("s3fs", "aiobotocore", "botocore", "gcsfs", "adlfs", "cryptography")
FLEET = """
import json, pathlib, threading, time
from warmgraph_backends.fleet.fleet import Fleet
fleet = Fleet(pathlib.Path(sys.argv[1]))
store = fleet.store(pathlib.Path(sys.argv[2]), lambda: 1 << 30)
remote = fleet.remote(store)
claims = fleet.claims(store, lambda: 60.0)
"""


def run(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    private = tmp_path / "user" / "__warmgraph"
    private.mkdir(parents=True, exist_ok=True)
    arguments = [str(private), str(tmp_path / "store")]
    return subprocess.run(
        [sys.executable, "-c", ADOPT + FLEET + code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_nothing_is_imported_for_a_fleet_that_nobody_asked_for(tmp_path: Path) -> None:
    code = "from warmgraph_backends import engine\n"
    code += f"print([name for name in {CLIENTS!r} if name in sys.modules])"
    done = run(code, tmp_path)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_setting_a_remote_up_imports_no_client_before_it_is_asked(tmp_path: Path) -> None:
    code = f"print(remote is not None, [n for n in {CLIENTS!r} if n in sys.modules])"
    pytest.importorskip("s3fs", reason="the extra [s3] is not installed")
    done = run(code, tmp_path, WARMGRAPH_REMOTE="s3://bucket/graphs")
    assert done.stdout.splitlines()[-1:] == ["True []"], done.stderr


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_process_ends_while_its_remote_hangs(tmp_path: Path, scheme: str) -> None:
    """With eight threads that wait for an answer, and one graph that is to be claimed."""
    pytest.importorskip("s3fs" if scheme == "s3" else "aiohttp", reason="it is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        options = {"key": "x", "secret": "y", "endpoint_url": f"http://{address}"}
        content = {
            "remote": "s3://bucket/graphs" if scheme == "s3" else f"http://{address}/graphs",
            "mode": "write" if scheme == "s3" else "read",
            "patience_s": 1,
            "options": options if scheme == "s3" else {},
        }
        private = tmp_path / "user" / "__warmgraph"
        private.mkdir(parents=True)
        (private / "fleet.json").write_text(json.dumps(content), "utf-8")
        code = """
told = threading.Semaphore(0)
for number in range(20):
    assert remote.look(f"{number:064x}", "t", told.release)
for _ in range(20):
    assert told.acquire(timeout=30)
remote._rests_until = 0.0
claims.take("f" * 64, "t")
assert remote.look("e" * 64, "t", lambda: None)
time.sleep(0.3)
claims.close()
print(time.time())
"""
        done = run(code, tmp_path)
        assert done.returncode == 0, done.stderr
        assert time.time() - float(done.stdout) < 15
