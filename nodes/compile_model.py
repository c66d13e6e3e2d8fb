"""Nodes that make a MODEL run through compiled graphs: Compile Model and Load Compiled Graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from comfy_api.latest import io
from typing_extensions import override

from ..backends.errors import GraphsNameError, StrictError
from ..backends.folders import validate_graphs_name
from . import server
from .progress import node_progress
from .summary import summary_text

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

logger = logging.getLogger(__name__)

NO_FOLDER = "no graphs saved yet"


class WarmgraphCompileModel(io.ComfyNode):
    """Compile a model's blocks once, for every size, batch, prompt, LoRA and checkpoint."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WarmgraphCompileModel",
            display_name="Compile Model",
            category="Warmgraph",
            description=(
                "Makes every image of this model faster. Put it between the checkpoint (or LoRA) "
                "loader and the sampler. The model's building blocks are compiled once; from then "
                "on every size, batch, prompt length, LoRA and checkpoint of this architecture "
                "uses the same graphs, after a restart as well. What cannot be compiled runs as "
                "without this node, and the node says why."
            ),
            search_aliases=["torch compile", "speed up", "faster", "inductor", "warmgraph"],
            inputs=[
                io.Model.Input("model", tooltip="The model to compile. It is not changed."),
                io.Combo.Input(
                    "when_missing",
                    options=["background", "wait", "never"],
                    default="background",
                    tooltip=(
                        "What to do about graphs that are not there yet. background: make this "
                        "image without them while they are built, and use each as it arrives. "
                        "wait: build first, then sample. never: use only saved graphs."
                    ),
                ),
                io.String.Input(
                    "graphs",
                    default="",
                    tooltip=(
                        "Where this workflow's graphs are kept. Empty: beside the saved workflow, "
                        "or in the shared store only while it has no file. A name: NAME.graphs in "
                        "your workflows folder."
                    ),
                ),
                io.Combo.Input(
                    "backend",
                    options=["auto", "inductor", "eager"],
                    default="auto",
                    advanced=True,
                    tooltip=(
                        "Which compiler to use. auto: the best one that works here. inductor: "
                        "PyTorch's compiler (needs Triton on a GPU). eager: none, to compare."
                    ),
                ),
            ],
            outputs=[
                io.Model.Output(
                    display_name="model",
                    tooltip="The same model, running through compiled graphs where there are any.",
                )
            ],
            hidden=[io.Hidden.unique_id],
            has_intermediate_output=True,  # its text comes back when the host's cache serves it
        )

    @classmethod
    @override
    def validate_inputs(cls, graphs: str | None = None) -> bool | str:
        return _validate_name(graphs)

    @classmethod
    @override
    def execute(
        cls, model: ModelPatcher, when_missing: str, graphs: str, backend: str
    ) -> io.NodeOutput:
        def attach() -> ModelPatcher:
            with node_progress(cls.hidden.unique_id) as progress:
                return server.get_engine().compile_model(
                    model,
                    when_missing=when_missing,
                    graphs=graphs.strip(),
                    backend=backend,
                    on_progress=progress,
                )

        return _attached_or_unchanged(model, attach)


class WarmgraphLoadCompiledGraph(io.ComfyNode):
    """Use the graphs of one folder and never build."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        folders = server.graph_folders() or [NO_FOLDER]
        return io.Schema(
            node_id="WarmgraphLoadCompiledGraph",
            display_name="Load Compiled Graph",
            category="Warmgraph",
            description=(
                "Runs a model through graphs that were compiled before, from a folder saved with a "
                "workflow, and never compiles anything. Use it to get a workflow's speed on "
                "another machine with the same kind of GPU, or to be sure that nothing is built."
            ),
            search_aliases=["load graph", "compiled", "warmgraph"],
            inputs=[
                io.Model.Input("model", tooltip="The model to speed up. It is not changed."),
                io.Combo.Input(
                    "folder",
                    options=folders,
                    tooltip=(
                        "A folder of graphs below your workflows folder. Press R to read the list "
                        "again. Graphs from another machine are used only once they are trusted, "
                        "at the server's console."
                    ),
                ),
                io.Boolean.Input(
                    "strict",
                    default=False,
                    tooltip=(
                        "On: refuse to run, and say why, if any part of the model would run "
                        "without a graph. Off: run such parts as without this node."
                    ),
                ),
            ],
            outputs=[
                io.Model.Output(
                    display_name="model",
                    tooltip="The same model, running through the folder's graphs.",
                )
            ],
            has_intermediate_output=True,
        )

    @classmethod
    @override
    def validate_inputs(cls, folder: str | None = None) -> bool | str:
        """Accept a folder that is not listed: only strict may refuse to run without it."""
        return True if folder is None or isinstance(folder, str) else "folder must be a text"

    @classmethod
    @override
    def execute(cls, model: ModelPatcher, folder: str, strict: bool) -> io.NodeOutput:
        def attach() -> ModelPatcher:
            return server.get_engine().load_graphs(model, folder, strict=strict)

        return _attached_or_unchanged(model, attach)


def _attached_or_unchanged(
    model: ModelPatcher, attach: Callable[[], ModelPatcher]
) -> io.NodeOutput:
    """Return the attached model and its text; what goes wrong, but for strict, costs only speed."""
    try:
        compiled = attach()
        report = server.get_engine().report(compiled)
    except StrictError:
        raise
    except Exception as error:  # nothing may fail a prompt that eager would have finished
        logger.exception("The model runs as without this node")
        return _output(model, "", f"runs as without this node: {error}")
    return _output(compiled, report["id"], summary_text(report))


def _output(model: ModelPatcher, report_id: str, text: str) -> io.NodeOutput:
    """Return `model` and the `ui` that binds the node to a report; the page keeps its text live."""
    return io.NodeOutput(model, ui={"warmgraph": [{"id": report_id, "text": text}]})


def _validate_name(graphs: str | None) -> bool | str:
    if graphs is None or not graphs.strip():
        return True
    try:
        validate_graphs_name(graphs.strip())
    except GraphsNameError as error:
        return str(error)
    return True
