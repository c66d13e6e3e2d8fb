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
