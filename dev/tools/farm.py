"""A build farm of processes on this machine: a scheduler, and workers over TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .host import free_port

BUILD_WORKER = (Path(__file__).resolve().parents[2] / "cli.py", "build-worker")
_PATIENCE_S = 60.0


class Farm:
    """A scheduler and its workers; each says in a log what it does.

    Attributes:
        address: the scheduler's.
        folder: holds the logs, and in `tmp` the workers' temporary files.
    """

    def __init__(
        self, folder: Path, *, protocol: str = "tcp", options: Sequence[str | Path] = ()
    ) -> None:
        """Start the scheduler, with its options."""
        self.folder = folder
        self.address = f"{protocol}://127.0.0.1:{free_port()}"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        command = ["-m", "distributed.cli.dask_scheduler", "--protocol", protocol, "--no-dashboard"]
        command += ["--host", "127.0.0.1", "--port", self.address.rpartition(":")[2], *options]
        self.scheduler = self._start("scheduler", "scheduler", command)
        self.wait_for("scheduler", "Scheduler at")

    def add(
        self, name: str, *options: str | Path, command: Sequence[str | Path] = BUILD_WORKER
    ) -> None:
        """Start a worker, by a command with its options, and wait until the scheduler knows it."""
        whole = [*command, self.address, "--name", name, *options]
        self.workers[name] = self._start(name, "tmp", whole)
        self.wait_for(name, f"builds for {self.address}")

    def log(self, name: str) -> str:
        """What a worker, or "scheduler", has said."""
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")

    def begun(self, name: str) -> int:
        """How many builds a worker has begun."""
        return sum(line.startswith("Builds ") for line in self.log(name).splitlines())

    def wait_for(self, name: str, text: str) -> None:
        """Wait until somebody says something."""
        until = time.monotonic() + _PATIENCE_S
        while text not in self.log(name):
            assert time.monotonic() < until, f"{name} never said {text!r}:\n{self.log(name)}"
            time.sleep(0.05)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        """End a worker and wait for it; returns its exit status."""
        worker = self.workers.pop(name)
        worker.send_signal(number)
        return worker.wait(_PATIENCE_S)

    def kill_scheduler(self) -> None:
        """Kill the scheduler, as a machine's end does."""
        self.scheduler.kill()
        self.scheduler.wait(_PATIENCE_S)

    def stop(self) -> None:
        """End all that still run."""
        for name in list(self.workers):
            self.end(name)
        self.kill_scheduler()

    def left(self) -> list[str]:
        """What lies in the folder for workers' temporary files."""
        return sorted(os.listdir(self.folder / "tmp"))

    def _start(
        self, name: str, place: str, command: Sequence[str | Path]
    ) -> subprocess.Popen[bytes]:
        temporary = self.folder / place  # dask's scheduler leaves its own when it is killed
        temporary.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *map(str, command)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return the files of a certificate that signed itself, and of its key, made by openssl."""
    certificate, key = folder / "farm.pem", folder / "farm.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=farm", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
