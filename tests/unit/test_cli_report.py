"""The console's `report` says in words what a server answers, or why none does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from .console import run, run_listing_imports

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
        "compiling 1 of 4 (paused)",
        "this server: 3 graphs compiled, 1 loaded; store: 4 files, 3.0 MiB",
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
