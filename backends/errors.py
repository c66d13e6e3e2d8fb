"""Every error that Warmgraph raises, drawn once.

WarmgraphError              base: `reason` says why, `remedy` what to do
├── RequirementError        a backend cannot work here (no Triton, no CUDA, torch too old)
├── DescriptionError        a module cannot be written down for a worker
├── LearnError              how a block or a model is called cannot be learned
├── ManifestError           what a graph file or a worker says of a graph is not of the right kind
├── BuildError              a build failed, was killed or ran out of time
│   └── BrokenWorkerError   nor can its worker build anything else now
├── GraphFileError          a graph file is damaged, unsigned, foreign or cannot be written
│   └── RefusedFileError    (graph_file.py) which check it did not pass, and which file
├── GraphsNameError         a graphs name or workflow path is not a plain, safe name
└── StrictError             Load Compiled Graph in strict mode found something that would run eager
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from .reasons import NOTHING, Reason, of, with_remedy

_CLI = Path(__file__).resolve().parents[1] / "cli.py"
#: Characters of what came in that a message repeats.
_SHOWN = 40
#: Characters that a widget's text may have.
MAX_TEXT = 4096


def shown(value: object) -> str:
    """Return an input for a message: a text's beginning, or the type of anything large."""
    if isinstance(value, str):
        start = ascii(value[:_SHOWN])
        if len(value) <= _SHOWN and len(start) <= 1.5 * _SHOWN:
            return start
        return f"{start[:_SHOWN]}... ({len(value)} characters)"
    if isinstance(value, int) and abs(value) > 10**15:
        return "a number with too many digits"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"a {type(value).__name__}"


def console_command(*words: str) -> str:
    """Return one of our commands as typed at the server's console, whatever folder that is in:
    with the Python that runs the server, and with the paths of this machine.
    """
    every = [sys.executable, str(_CLI), *words]
    return subprocess.list2cmdline(every) if sys.platform == "win32" else shlex.join(every)


def validate_length(name: str, text: str) -> str:
    """Return `text` if it is as short as a widget's text may be, before anything reads it.

    Raises:
        ValueError: it is longer.
    """
    if len(text) > MAX_TEXT:
        raise ValueError(f"{name} must have at most {MAX_TEXT} characters, got {shown(text)}")
    return text


class WarmgraphError(Exception):
    """Base of all errors; the text is `told`: `reason`, followed by `remedy` where there is one.

    `final` says that it cannot change while this process lives, so that nothing is tried again.
    """

    def __init__(self, reason: Reason, *, remedy: Reason = NOTHING, final: bool = False) -> None:
        self.reason = Reason.plain(reason)
        self.remedy = Reason.plain(remedy)
        self.told = with_remedy(self.reason, self.remedy)
        self.final = final
        super().__init__(self.told)


class RequirementError(WarmgraphError):
    """A backend cannot work on this machine."""


class DescriptionError(WarmgraphError):
    """A module cannot be described as plain data, so no worker can rebuild it."""


class LearnError(WarmgraphError):
    """How a block, or any block of a model, is called cannot be learned."""


class ManifestError(WarmgraphError):
    """What a graph file or a worker says about a graph is invalid; `field` names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(Reason.plain(f"{field} {problem}"))
        self.field = field


class BuildError(WarmgraphError):
    """A build failed; the graph's regions stay eager."""


class BrokenWorkerError(BuildError):
    """A build failed, and so would any other in this process, because of its card, memory or disk;
    a new process may succeed.
    """


class CancelledBuildError(BuildError):
    """The user cancelled a build; the next run that needs its graph asks for it again."""

    def __init__(self) -> None:
        super().__init__(of("cancelled"))


class GraphFileError(WarmgraphError):
    """A graph file must not be used, or could not be written."""


class GraphsNameError(WarmgraphError, ValueError):
    """A graphs name or workflow path must be a plain name inside the user's workflows folder."""


class StrictError(WarmgraphError):
    """Strict loading found regions that would run eager."""
