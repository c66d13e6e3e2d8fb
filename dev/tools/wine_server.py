"""A real ComfyUI server by Windows' Python under Wine, which answers a prompt with our node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from warmgraph_console.own_server import HostError

from .host import Graph, Server
from .install import PACK, prepare_base

if TYPE_CHECKING:
    from .windows import Wine

KIND = "narrow15"
#: Its streams must be pipes.
PIPED = ("-c", ': | "$@" 2>&1 | cat', "sh")
LIMIT_S = 900.0


def prompt(checkpoint: str) -> Graph:
    """Return a prompt of two steps of 64x64 pixels, through Compile Model."""
    sampler = {"seed": 1, "steps": 2, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal"}
    links = {"positive": ["2", 0], "negative": ["2", 0], "latent_image": ["3", 0], "denoise": 1.0}
    size = {"width": 64, "height": 64, "batch_size": 1}
    nodes = {
        "1": ("CheckpointLoaderSimple", {"ckpt_name": checkpoint}),
        "2": ("CLIPTextEncode", {"clip": ["1", 1], "text": "a cat"}),
        "3": ("EmptyLatentImage", size),
        "4": ("WarmgraphCompileModel", {"model": ["1", 0], "when_missing": "wait"}),
        "5": ("KSampler", {"model": ["4", 0], **sampler, **links}),
        "6": ("SaveLatent", {"samples": ["5", 0], "filename_prefix": "latents/wine"}),
    }
    return {key: {"class_type": name, "inputs": given} for key, (name, given) in nodes.items()}


def answer(wine: Wine) -> str:
    """Start the server, ask it, and end it.

    Returns:
        What the node's report says.

    Raises:
        HostError: it did not start or answer, or our node had no part in it.
    """
    base = prepare_base(wine.home / "server", wine.tree)
    command = [sys.executable, "-m", "dev.tools.checkpoints", "--host", str(wine.tree)]
    command += ["--models", str(base / "models"), KIND]
    subprocess.run(command, cwd=PACK, check=True, stdout=subprocess.DEVNULL)
    (base / "server.log").unlink(missing_ok=True)
    server = Server(
        wine.tree,
        base,
        python="/bin/sh",
        before=(*PIPED, wine.loader, str(wine.python)),
        environment=wine.environment,
    )
    try:
        server.start(LIMIT_S)
        run = server.run(prompt(f"{KIND}.safetensors"), timeout=LIMIT_S)
        if not all(path.is_file() for path in server.files(run, "latents")):
            raise HostError("the latent is not where the server says")
        reports = server.model_reports(run)
        if len(reports) != 1 or not reports[0]["regions"]["total"]:
            raise HostError(f"our node had no part in it: {reports}")
        total, compiled = (reports[0]["regions"][name] for name in ("total", "compiled"))
        why = ", ".join(sorted({each["reason"] for each in reports[0]["eager"]}))
        if "C++ compiler" not in why:  # nothing else may be in the way
            raise HostError(f"{compiled} of {total} parts are compiled: {why}")
        return f"answered in {run.seconds:.0f} s; {compiled} of {total} parts are compiled: {why}"
    finally:
        with contextlib.suppress(HostError, OSError):
            os.killpg(server.pid, signal.SIGKILL)
        server.kill()
