"""A real ComfyUI server in a process of its own, with a client for its API."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FLAGS = (
    "--use-pytorch-cross-attention",  # the attention that GPUs use
    "--database-url",
    "sqlite:///:memory:",
    "--disable-api-nodes",
    "--disable-auto-launch",
)

Graph = dict[str, dict[str, Any]]
"""A prompt in the API format: node id -> class_type and inputs."""


class HostError(RuntimeError):
    """The server did not start, refused a prompt or a node failed; the text says which and why."""


class Run(NamedTuple):
    """One finished prompt."""

    prompt_id: str
    seconds: float
    history: dict[str, Any]

    @property
    def outputs(self) -> dict[str, Any]:
        """What each node showed: node id -> `ui` data."""
        return dict(self.history["outputs"])

    @property
    def cached(self) -> set[str]:
        """Ids of the nodes that the host served from its cache."""
        messages = self.history["status"]["messages"]
        return {n for event, data in messages if event == "execution_cached" for n in data["nodes"]}


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _interrupts_reach_children() -> Iterator[None]:
    """Let a child started inside hear SIGINT although this process was told to ignore it.

    A shell starts background commands that way, and what is ignored stays so in their children.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


class Server:
    """A ComfyUI server; a context manager that starts and stops it.

    Args:
        tree: The ComfyUI tree.
        base: A prepared base directory (`prepare_base`).
        python: The interpreter that has torch and the host's requirements.
        flags: Further command line flags; `--cpu` is one of them where there is no GPU.
        environment: Variables added to this process's.
    """

    def __init__(
        self,
        tree: Path,
        base: Path,
        *,
        python: str = sys.executable,
        flags: Sequence[str] = ("--cpu",),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.tree, self.base, self.python = tree, base, python
        self.flags = tuple(flags)
        self.environment = environment or {}
        self.port = 0
        self.log_file = base / "server.log"
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

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self, timeout: float = 600.0) -> None:
        """Start the server and wait until it answers."""
        if self._process is not None:
            raise HostError("the server must be stopped before it is started, got a running one")
        self.port = free_port()
        command = [self.python, str(self.tree / "main.py"), "--port", str(self.port), *FLAGS]
        command += ["--base-directory", str(self.base), *self.flags]
        windows = sys.platform == "win32"
        with self.log_file.open("ab") as log, _interrupts_reach_children():
            self._process = subprocess.Popen(
                command,
                cwd=self.tree,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=not windows,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0) if windows else 0,
            )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._process = None
                raise HostError(f"the server ended while starting:\n{self.log[-3000:]}")
            with contextlib.suppress(OSError):
                self.get("/system_stats", timeout=30)
                return
            time.sleep(0.2)
        self.kill()
        raise HostError(f"the server did not answer within {timeout:g} s:\n{self.log[-3000:]}")

    def stop(self, timeout: float = 120.0) -> None:
        """Stop the server as Ctrl+C does; kill it if it does not go."""
        if self._process is None:
            return
        stop = signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGINT
        self._process.send_signal(stop)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """End the server at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Stop the server and start it again; its base directory and log stay."""
        self.stop()
        self.start()

    def request(
        self, path: str, body: Any = None, *, method: str | None = None, timeout: float = 300.0
    ) -> bytes:
        """Send one request and return the raw answer; `body` goes as JSON unless it is bytes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return bytes(answer.read())

    def get(self, path: str, *, timeout: float = 300.0) -> Any:
        """Return the JSON answer of a GET."""
        return json.loads(self.request(path, timeout=timeout))

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON answer of a POST, None when it is empty."""
        raw = self.request(path, body)
        return json.loads(raw) if raw else None

    def report(self) -> dict[str, Any]:
        """Return what GET /warmgraph/report says."""
        return dict(self.get("/warmgraph/report"))

    def model_reports(self, run: Run) -> list[dict[str, Any]]:
        """Return the present reports of the models that our nodes attached to in a run."""
        shown = {item["id"] for ui in run.outputs.values() for item in ui.get("warmgraph", [])}
        return [report for report in self.report()["models"] if report["id"] in shown]

    def object_info(self) -> dict[str, Any]:
        """Return the description of every node class."""
        return dict(self.get("/object_info"))

    def save_workflow(self, name: str, workflow: dict[str, Any]) -> str:
        """Save a workflow as the page does; return its path relative to the user's folder."""
        path = f"workflows/{name}.json"
        quoted = urllib.parse.quote(path, safe="")
        self.request(f"/userdata/{quoted}?overwrite=true", json.dumps(workflow).encode())
        return path

    def submit(
        self,
        graph: Graph,
        *,
        workflow: dict[str, Any] | None = None,
        client_id: str | None = None,
        extra_data: dict[str, Any] | None = None,
    ) -> str:
        """Queue a prompt and return its id; `extra_data` is what goes along beside a workflow.

        Raises:
            HostError: The host refused it, or any of its outputs.
        """
        prompt_id = str(uuid.uuid4())
        extra = {"extra_pnginfo": {"workflow": workflow}} if workflow is not None else {}
        body = {
            "prompt": graph,
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

    def wait(self, prompt_id: str, timeout: float = 900.0) -> dict[str, Any]:
        """Return the history entry of a prompt once it has ended, however it ended."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise HostError(f"the server ended during a prompt:\n{self.log[-3000:]}")
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None:
                return dict(entry)
            time.sleep(0.05)
        raise HostError(f"prompt {prompt_id} did not end within {timeout:g} s")

    def run(
        self,
        graph: Graph,
        *,
        workflow: dict[str, Any] | None = None,
        extra_data: dict[str, Any] | None = None,
        timeout: float = 900.0,
    ) -> Run:
        """Queue a prompt, wait for it, and return its outputs and the seconds that it executed.

        Raises:
            HostError: It was refused, a node failed, or it was interrupted.
        """
        prompt_id = self.submit(graph, workflow=workflow, extra_data=extra_data)
        entry = self.wait(prompt_id, timeout)
        status = entry["status"]
        if status["status_str"] != "success":
            raise HostError(_failure(status["messages"]))
        times = {event: data["timestamp"] for event, data in status["messages"]}
        seconds = (times["execution_success"] - times["execution_start"]) / 1000
        return Run(prompt_id, seconds, entry)

    def files(self, run: Run, kind: str = "images") -> Iterator[Path]:
        """Yield the paths of what SaveImage ("images") or SaveLatent ("latents") wrote in a run."""
        for shown in run.outputs.values():
            for item in shown.get(kind, []):
                yield self.base / item["type"] / item["subfolder"] / item["filename"]

    def wait_until_built(self, timeout: float = 900.0) -> dict[str, Any]:
        """Wait until all graphs that were asked for are built and loaded; return the report."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            report = self.report()
            if not report["awaited"]:
                return report
            time.sleep(0.5)
        building = report["building"]
        raise HostError(f"graphs were still being built after {timeout:g} s: {building}")


def _failure(messages: list[tuple[str, dict[str, Any]]]) -> str:
    for event, data in messages:
        if event == "execution_error":
            trace = "".join(data["traceback"])
            return f"{data['node_type']} failed: {data['exception_message'].strip()}\n{trace}"
    return f"the prompt did not succeed: {messages[-1]}"
