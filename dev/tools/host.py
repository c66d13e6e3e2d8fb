"""A real ComfyUI server in a process of its own over a prepared base folder, for tests."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from warmgraph_console.own_server import HostError, OwnServer, failure, free_port

__all__ = ["Graph", "HostError", "Run", "Server", "free_port"]

FLAGS = ("--use-pytorch-cross-attention",)  # the attention that GPUs use

Graph = dict[str, dict[str, Any]]
"""A prompt in the API format: node id -> class_type and inputs."""


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


class Server(OwnServer):
    """A ComfyUI server; a context manager that starts and stops it.

    Args:
        tree: The ComfyUI tree.
        base: A prepared base directory (`prepare_base`).
        flags: Further command line flags; `--cpu` is one of them where there is no GPU.
        options: Of `OwnServer`.
    """

    def __init__(
        self, tree: Path, base: Path, *, flags: Sequence[str] = ("--cpu",), **options: Any
    ) -> None:
        flags = (*FLAGS, "--base-directory", str(base), *flags)
        super().__init__(tree, base / "server.log", flags=flags, **options)
        self.base = base

    def __enter__(self) -> Server:
        self.start()
        return self

    def restart(self) -> None:
        """Stop the server and start it again; its base directory and log stay."""
        self.stop()
        self.start()

    def model_reports(self, run: Run) -> list[dict[str, Any]]:
        """Return the present reports of the models that our nodes attached to in a run."""
        shown = {item["id"] for ui in run.outputs.values() for item in ui.get("warmgraph", [])}
        return [report for report in self.report()["models"] if report["id"] in shown]

    def save_workflow(self, name: str, workflow: dict[str, Any]) -> str:
        """Save a workflow as the page does; return its path relative to the user's folder."""
        path = f"workflows/{name}.json"
        quoted = urllib.parse.quote(path, safe="")
        self.request(f"/userdata/{quoted}?overwrite=true", json.dumps(workflow).encode())
        return path

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
        if (why := failure(entry)) is not None:
            raise HostError(why)
        times = {event: data["timestamp"] for event, data in entry["status"]["messages"]}
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
