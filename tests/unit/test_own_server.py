"""A server of one's own that is told to end while it starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from warmgraph_console.own_server import OwnServer

SLEEPS = "import time\ntime.sleep(60)\n"
#: Answers, and clears up after Ctrl+C.
ENDS_WELL = """
import http.server, sys, time
from pathlib import Path

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers)
server.timeout = 0.05
try:
    while True:
        server.handle_request()
except KeyboardInterrupt:
    Path(__file__).with_name("cleaned up").write_text(sys.path[0])
"""


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """A shell may have told this process to ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")
@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_while_the_process_starts_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)  # before the server knows of it

    (tmp_path / "main.py").write_text(SLEEPS, "utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            OwnServer(tmp_path, tmp_path / "log").start()
    assert len(started) == 1 and not psutil.pid_exists(started[0])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_server_that_is_stopped_clears_up(tmp_path: Path) -> None:
    """Under Windows, too, where no signal makes it do so."""
    (tmp_path / "main.py").write_text(ENDS_WELL, "utf-8")
    with OwnServer(tmp_path, tmp_path / "log") as server:
        assert server.get("/system_stats") == {}
    assert Path((tmp_path / "cleaned up").read_text()) == tmp_path
    assert "Traceback" not in server.log
