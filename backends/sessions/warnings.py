"""What on this machine prevents compiling, for a user to fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..compilers.preflight import doubts, install_command, needs
from ..contract import Requirement
from ..device.gpu import compiled_for
from ..errors import BuildError, console_command
from ..graphs.library import Graphs
from ..host_api.needs import Feature
from ..host_api.present import why_off
from ..reasons import Reason
from .lines import Line, line, plain
from .settings import Settings

#: What may be missing, and the sentence that tells of it.
_MISSING = {
    "torch": "mend_torch",
    "Triton": "mend_triton",
    "C compiler": "mend_c_compiler",
    "C++ compiler": "mend_cpp_compiler",
}


class Warning(NamedTuple):
    """One problem that a user can fix.

    Attributes:
        id: of the problem; a page shows each once.
        lines: in a few words; then why, and what to do.
        command: to be typed at the server's console, "" for none.
    """

    id: str
    lines: tuple[Line, Line]
    command: str = ""

    @property
    def title(self) -> str:
        """What it is, in English."""
        return self.lines[0].text

    @property
    def text(self) -> str:
        """Why, and what to do, in English."""
        return self.lines[1].text

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-plain data."""
        return {
            "id": self.id,
            "title": self.title,
            "text": self.text,
            "command": self.command,
            "lines": plain(self.lines),
        }


def of_machine() -> tuple[Warning, ...]:
    """Check what compiling needs here, once for each sort of device, as it takes milliseconds.

    A card may appear later: processes are kept in memory snapshots while it is hidden.
    """
    return _of(compiled_for())


@cache
def _of(device: str) -> tuple[Warning, ...]:
    unmet = tuple(_missing(need) for need in needs(device) if not need.met)
    return unmet or tuple(map(_doubtful, doubts(device)))


def of_settings(settings: Settings, off: Mapping[Feature, Reason]) -> Iterator[Warning]:
    """Yield what a user has switched on but this host does not allow; `off`: see `missing`."""
    why = why_off(off, Feature.EVERYWHERE)
    if settings.compiles_all and why is not None:
        lines = (line("mend_everywhere"), line("mend_everywhere_why", reason=why))
        yield Warning("everywhere", lines)


def of_graphs(
    graphs: Graphs, verdict: BuildError | None, trust_command: Callable[[Path], str]
) -> Iterator[Warning]:
    """Yield problems of finding, building and keeping graphs.

    Args:
        verdict: why nothing can be built any more, if so.
        trust_command: returns the command that trusts the files of a folder.
    """
    if verdict is not None:
        why = line("mend_builds_why", reason=verdict.told)
        yield Warning("no builds", (line("mend_builds"), why), console_command("doctor"))
    if graphs.unkept is not None:
        why = line("mend_store_why", reason=graphs.unkept)
        yield Warning("store", (line("mend_store"), why))
    for folder in graphs.untrusted():
        yield Warning(
            f"untrusted {folder}",
            (line("mend_untrusted"), line("mend_untrusted_why", folder=folder)),
            trust_command(folder),
        )


def _missing(need: Requirement) -> Warning:
    told = {"name": need.name, "reason": need.reason, "remedy": need.remedy}
    title = line(_MISSING.get(need.name, "mend_other"), **told)
    command = install_command(need)
    return Warning(f"missing {need.name}", (title, line("mend_other_why", **told)), command)


def _doubtful(need: Requirement) -> Warning:
    told = {"name": need.name, "reason": need.reason, "remedy": need.remedy}
    lines = (line("mend_doubtful", **told), line("mend_doubtful_why", **told))
    return Warning(f"doubtful {need.name}", lines, install_command(need))
