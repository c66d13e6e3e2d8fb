"""The common parts of the nodes that attach graphs to a host object."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from comfy_api.latest import io

from ..backends.compilers.registry import CHOICES
from ..backends.contract import AUTO, CallForm, WhenMissing
from ..backends.engine import Engine, Progress
from ..backends.errors import StrictError, validate_length
from ..backends.sessions.lines import line, plain
from ..backends.storing.folders import validate_graphs_name
from . import server
from .progress import node_progress

logger = logging.getLogger(__name__)

NO_FOLDER = "no compiled graphs saved yet"


def compile_inputs() -> list[io.WidgetInput]:
    """The widgets of every Compile node, in their order: when_missing, graphs, backend."""
    return [
        io.Combo.Input(
            "when_missing",
            display_name="while compiling",
            options=[choice.value for choice in WhenMissing],
            default=WhenMissing.BACKGROUND.value,
            tooltip=(
                "What to do while graphs are not compiled yet. go on: make this image at normal "
                "speed meanwhile, and use each graph once it is ready. wait: compile first, then "
                "make the image. never compile: use only compiled graphs that exist."
            ),
        ),
        io.String.Input(
            "graphs",
            display_name="compiled graphs",
            default="",
            optional=True,  # prompts by API may leave them out
            tooltip=(
                "Where this workflow's compiled graphs are kept. Empty: beside the saved workflow; "
                "in the shared store only while it has no file. A name: NAME.graphs in your "
                "workflows folder."
            ),
        ),
        io.Combo.Input(
            "backend",
            display_name="compiler",
            options=list(CHOICES),
            default=AUTO,
            optional=True,
            advanced=True,
            tooltip=(
                "Which compiler to use. automatic: the best one that works here. PyTorch's "
                "compiler: it needs Triton on a GPU. none, to compare: steps are only timed."
            ),
        ),
    ]


def load_inputs() -> list[io.WidgetInput]:
    """The widgets of every Load node, in their order: folder, strict."""
    return [
        io.Combo.Input(
            "folder",
            options=server.graph_folders() or [NO_FOLDER],
            tooltip=(
                "A folder of compiled graphs below your workflows folder. Press R to read the list "
                "again. Those from another machine are used only once they are trusted, at the "
                "server's console."
            ),
        ),
        io.Boolean.Input(
            "strict",
            default=False,
            tooltip=(
                "On: refuse to run, and say why, if any part has no compiled graph. Off: run such "
                "parts at normal speed."
            ),
        ),
    ]


def compiled_or_unchanged(
    thing: Any, node_id: str, start: Callable[[Engine, Progress], Any]
) -> io.NodeOutput:
    """Return what `start` made of `thing`, its waiting shown on the node."""

    def attach() -> Any:
        with node_progress(node_id) as progress:
            return start(server.get_engine(), progress)

    return attached_or_unchanged(thing, attach)


def attached_or_unchanged(thing: Any, attach: Callable[[], Any]) -> io.NodeOutput:
    """Return what `attach` made and its text; any error except strict's costs only speed."""
    try:
        compiled = attach()
        report = server.get_engine().report(compiled)
    except StrictError:
        raise
    except Exception as error:  # nothing may fail a prompt that eager would have finished
        logger.exception("The %s runs as without this node", type(thing).__name__)
        return node_output(thing, "", plain([line("failed", error=error)]))
    return node_output(compiled, report["id"], report["lines"])


def validate_name(graphs: str | None) -> bool | str:
    """Accept an empty name or a plain one; a text says what is wrong with others."""
    try:
        if graphs is not None and validate_length("graphs", graphs).strip():
            validate_graphs_name(graphs.strip())
    except ValueError as error:  # includes GraphsNameError
        return str(error)
    return True


def validate_form(form: str | None) -> bool | str:
    """Accept a form, also those of older versions; None if linked."""
    try:
        if form is not None:
            CallForm(form)
    except ValueError:
        known = ", ".join(each.value for each in CallForm)
        return f"mode must be one of: {known}"
    return True


def validate_folder(folder: str | None) -> bool | str:
    """Accept a folder that is not listed: only strict may refuse to run without it."""
    if folder is not None and not isinstance(folder, str):
        return "folder must be a text"
    try:
        validate_length("folder", folder or "")
    except ValueError as error:
        return str(error)
    return True


def node_output(thing: object, report_id: str, lines: list[dict[str, Any]]) -> io.NodeOutput:
    """Return `thing` and the `ui` that binds the node to a report; the page keeps it live.

    Args:
        lines: of the node, as in a report.
    """
    text = "\n".join(each["text"] for each in lines)
    return io.NodeOutput(thing, ui={"warmgraph": [{"id": report_id, "text": text, "lines": lines}]})
