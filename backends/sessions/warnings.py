"""What of this machine or its files keeps models from being compiled, for a user to mend."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ..compilers.preflight import install_command, needs
from ..errors import BuildError
from ..runtime.graphs import Graphs

_CLI = Path(__file__).resolve().parents[2] / "cli.py"


class Warning(NamedTuple):
    """One thing that a user can mend.

    Attributes:
        id: says what it is of; a page shows each once.
        title: in a few words.
        text: why, and what to do.
        command: to be typed at the server's console, "" where there is none.
    """

    id: str
    title: str
    text: str
    command: str = ""


@cache
def of_machine() -> tuple[Warning, ...]:
    """Look at what compiling needs here; once a process, for it costs milliseconds."""
    device = "cuda" if torch.cuda.is_available() and torch.version.cuda is not None else "cpu"
    return tuple(
        Warning(
            f"missing {requirement.name}",
            f"{requirement.name} is missing",
            f"Nothing can be compiled: {requirement.reason}; {requirement.remedy}.",
            install_command(requirement),
        )
        for requirement in needs(device)
        if not requirement.met
    )


def of_graphs(graphs: Graphs, verdict: BuildError | None) -> Iterator[Warning]:
    """Yield what was met while graphs were looked for, built and kept.

    Args:
        verdict: why nothing can be built any more, if so.
    """
    if verdict is not None:
        text = f"{verdict}. Nothing is built until the server starts anew."
        yield Warning("no builds", "Nothing can be built", text, _command("doctor"))
    if graphs.unkept is not None:
        yield Warning(
            "store",
            "Compiled graphs cannot be kept",
            f"{graphs.unkept}. They work until the server ends, and are built again then.",
        )
    for folder in graphs.untrusted():
        yield Warning(
            f"untrusted {folder}",
            "Graphs from another machine are not used",
            f"The graphs in {folder} were not made here. A graph is code: trust them only if you "
            "know where they come from.",
            _command("trust", str(folder)),
        )


def _command(*words: str) -> str:
    every = [sys.executable, str(_CLI), *words]
    return subprocess.list2cmdline(every) if sys.platform == "win32" else shlex.join(every)
