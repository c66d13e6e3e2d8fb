"""Every error that Warmgraph raises, drawn once.

WarmgraphError              base: `reason` says why, `remedy` what to do
├── RequirementError        a backend cannot work here (no Triton, no CUDA, torch too old)
├── DescriptionError        a module cannot be written down for a worker
├── ManifestError           what a graph file or a worker says of a graph is not of the right kind
├── BuildError              a build failed, was killed or ran out of time
├── GraphFileError          a graph file is damaged, unsigned, foreign or cannot be written
│   └── RefusedFileError    (graph_file.py) which check it did not pass, and which file
├── GraphsNameError         a graphs name or workflow path is not a plain, safe name
└── StrictError             Load Compiled Graph in strict mode found something that would run
eager
"""

from __future__ import annotations


class WarmgraphError(Exception):
    """Base of all errors; the text is `reason`, followed by `remedy` where there is one."""

    def __init__(self, reason: str, *, remedy: str = "") -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy


class RequirementError(WarmgraphError):
    """A backend cannot work on this machine."""


class DescriptionError(WarmgraphError):
    """A module cannot be written down as plain data, so no worker can rebuild it."""


class ManifestError(WarmgraphError):
    """What a graph file or a worker says about a graph is not as it must be; `field` names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


class BuildError(WarmgraphError):
    """A build failed; the graph's regions stay eager."""


class GraphFileError(WarmgraphError):
    """A graph file must not be used, or could not be written."""


class GraphsNameError(WarmgraphError, ValueError):
    """A graphs name or workflow path must be a plain name inside the user's workflows folder."""


class StrictError(WarmgraphError):
    """Strict loading found regions that would run eager."""
