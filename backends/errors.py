"""Every error that Warmgraph raises, drawn once.

WarmgraphError              base: `reason` says why, `remedy` what to do
├── RequirementError        a backend cannot work here (no Triton, no CUDA, torch too old)
├── DescriptionError        a module cannot be written down for a worker
├── BuildError              a build failed, was killed or ran out of time
├── GraphFileError          a graph file is damaged, unsigned, foreign or cannot be written
│   └── RefusedFileError    (graph_file.py) which check it did not pass, and which file
├── GraphsNameError         a graphs name or workflow path is not a plain, safe name
└── StrictError             Load Compiled Graph in strict mode found something that would run
eager
"""

from __future__ import annotations


class WarmgraphError(Exception):
    """Base of all errors; the text is `reason`, followed by `remedy` where there is one.

    `final` says that it will be the same for as long as this process lives: nothing is tried again.
    """

    def __init__(self, reason: str, *, remedy: str = "", final: bool = False) -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy
        self.final = final


class RequirementError(WarmgraphError):
    """A backend cannot work on this machine."""


class DescriptionError(WarmgraphError):
    """A module cannot be written down as plain data, so no worker can rebuild it."""


class BuildError(WarmgraphError):
    """A build failed; the graph's regions stay eager."""


class GraphFileError(WarmgraphError):
    """A graph file must not be used, or could not be written."""


class GraphsNameError(WarmgraphError, ValueError):
    """A graphs name or workflow path must be a plain name inside the user's workflows folder."""


class StrictError(WarmgraphError):
    """Strict loading found regions that would run eager."""
