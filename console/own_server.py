"""A ComfyUI server in a separate process, and a client for its API."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: One's own server serves nobody else: no browser, no database on disk.
FLAGS = (
    "--database-url",
    "sqlite:///:memory:",
    "--disable-api-nodes",
    "--disable-auto-launch",
)

Prompt = Mapping[str, Mapping[str, Any]]
"""A prompt in the API format: node id -> class_type and inputs."""

_LAST_WORDS = 3000
#: Of a server that was told to stop: until it is told again.
_AGAIN_S = 20.0
_ENDING_HOST = Path(__file__).with_name("ending_host.py")


class HostError(RuntimeError):
    """The server did not start, refused a prompt or a node failed; the text says which and why."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delay signals that end this process until a child started inside is known, so none is lost.

    A child receives interrupts although this process ignores them, as shells do for background
    jobs: ignored signals stay so in children.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives them
        return
    heard: list[int] = []
    before = {
        each: signal.signal(each, lambda number, _frame: heard.append(number))
        for each in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in heard:
            signal.raise_signal(number)


class OwnServer:
    """A ComfyUI server; a context manager that starts and stops it.

    Args:
        tree: The ComfyUI tree.
        log_file: Its output is appended there.
        python: The interpreter that has torch and the host's requirements.
        before: What it runs, with the tree's `main.py` as an argument; by default that itself.
        flags: Command line flags, besides `FLAGS`.
        environment: Variables added to this process's.
    """

    def __init__(
        self,
        tree: Path,
        log_file: Path,
        *,
        python: str = sys.executable,
        before: Sequence[str] = (),
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.tree, self.log_file, self.python = tree, log_file, python
        self.flags, self.before = tuple(flags), tuple(before)
        self.environment = dict(environment or {})
        self.port = 0
        self.client_id = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of the running server, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise HostError("the server must be running to have a process id")
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything that all starts of this server have logged."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> OwnServer:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self, timeout: float = 600.0) -> None:
        """Start the server and wait until it answers."""
        if self._process is not None:
            raise HostError("the server must be stopped before it is started, got a running one")
        self.port = free_port()
        windows = sys.platform == "win32"  # where a pipe's end has it stop, else a signal
        before = [str(_ENDING_HOST), *self.before] if windows else self.before
        command = [self.python, *before, str(self.tree / "main.py")]
        command += ["--port", str(self.port), *FLAGS, *self.flags]
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0) if windows else 0
        try:
            with self.log_file.open("ab") as log, _interrupts_wait():
                self._process = subprocess.Popen(
                    command,
                    cwd=self.tree,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
                    stdin=subprocess.PIPE if windows else subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=not windows,
                    creationflags=flags,
                )
            self._wait_for_answer(self._process, timeout)
        except BaseException:  # an interrupt, too, leaves nothing behind
            self.kill()
            raise

    def _wait_for_answer(self, process: subprocess.Popen[bytes], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise HostError(f"the server ended while starting:\n{self.log[-_LAST_WORDS:]}")
            with contextlib.suppress(OSError):
                self.get("/system_stats", timeout=30)
                return
            time.sleep(0.2)
        raise HostError(
            f"the server did not answer within {timeout:g} s:\n{self.log[-_LAST_WORDS:]}"
        )

    def stop(self, timeout: float = 120.0) -> None:
        """Stop the server as Ctrl+C does, repeated if Python lost it, as an exception in a
        callback. Kill it if it does not end.
        """
        if self._process is None:
            return
        deadline = time.monotonic() + timeout
        while self._process is not None:
            if self._process.stdin is None:
                self._process.send_signal(signal.SIGINT)
            else:
                self._process.stdin.close()
            try:
                self._process.wait(min(_AGAIN_S, timeout))
                self._process = None
            except subprocess.TimeoutExpired:
                if time.monotonic() >= deadline:
                    self.kill()

    def kill(self) -> None:
        """End the server at once, like a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None

    def request(
        self, path: str, body: Any = None, *, method: str | None = None, timeout: float = 300.0
    ) -> bytes:
        """Send one request and return the raw answer; `body` goes as JSON unless it is bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        # A local server is not asked through a proxy.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout) as answer:
            return bytes(answer.read())

    def get(self, path: str, *, timeout: float = 300.0) -> Any:
        """Return the JSON answer of a GET."""
        return json.loads(self.request(path, timeout=timeout))

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON answer of a POST, None when it is empty."""
        raw = self.request(path, body)
        return json.loads(raw) if raw else None

    def object_info(self) -> dict[str, Any]:
        """Return the description of every node class."""
        return dict(self.get("/object_info"))

    def report(self) -> dict[str, Any]:
        """Return what GET /warmgraph/report says."""
        return dict(self.get("/warmgraph/report"))

    def submit(
        self,
        prompt: Prompt,
        *,
        workflow: Mapping[str, Any] | None = None,
        client_id: str | None = None,
        extra_data: Mapping[str, Any] | None = None,
    ) -> str:
        """Queue a prompt and return its id; `extra_data` is what goes along beside a workflow.

        Raises:
            HostError: The host refused it, or any of its outputs.
        """
        prompt_id = str(uuid.uuid4())
        extra = {"extra_pnginfo": {"workflow": workflow}} if workflow is not None else {}
        body = {
            "prompt": prompt,
            "prompt_id": prompt_id,
            "client_id": client_id or self.client_id,
            "extra_data": {**extra, **(extra_data or {})},
        }
        try:
            answer = self.post("/prompt", body)
        except urllib.error.HTTPError as error:
            raise HostError(f"the prompt was refused: {error.read().decode()[:3000]}") from None
        if answer["node_errors"]:
            raise HostError(f"outputs of the prompt were refused: {answer['node_errors']}")
        return str(answer["prompt_id"])

    def wait(
        self,
        prompt_id: str,
        timeout: float = 900.0,
        *,
        poll_s: float = 0.05,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Return the history entry of a prompt once it has ended, with or without an error.

        Args:
            timeout: seconds; the prompt goes on after it.
            poll_s: seconds between two requests.
            meanwhile: called between them.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise HostError(f"the server ended during a prompt:\n{self.log[-_LAST_WORDS:]}")
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                return dict(entry)
            meanwhile()
            time.sleep(poll_s)
        raise HostError(f"prompt {prompt_id} did not end within {timeout:g} s")


def failure(entry: Mapping[str, Any]) -> str | None:
    """Say why a prompt did not succeed, by its entry in the history; None if it did."""
    if entry["status"]["status_str"] == "success":
        return None
    messages = entry["status"]["messages"]
    for event, data in messages:
        if event == "execution_error":
            trace = "".join(data["traceback"])
            return f"{data['node_type']} failed: {data['exception_message'].strip()}\n{trace}"
    return f"the prompt did not succeed: {messages[-1]}"
