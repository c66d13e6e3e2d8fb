"""Nodes that make a MODEL run through compiled graphs: Compile Model and Load Compiled Graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io
from typing_extensions import override

from ..backends.contract import AUTO, CallForm
from . import server
from .compile_nodes import (
    attached_or_unchanged,
    compile_inputs,
    compiled_or_unchanged,
    load_inputs,
    validate_folder,
    validate_form,
    validate_name,
)

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


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
                "uses the same compiled graphs, after a restart as well. What cannot be compiled "
                "runs at normal speed, and the node says why."
            ),
            search_aliases=[  # single words: the host ranks one that equals the typed text first
                "torch compile",
                "faster",
                "speed",
                "speed up",
                "加速",
                "编译",
                "accelerate",
                "optimize",
                "performance",
                "tensorrt",
                "onediff",
                "stable fast",
                "inductor",
                "warmgraph",
            ],
            inputs=[
                io.Model.Input("model", tooltip="The model to compile. It is not changed."),
                *compile_inputs(),
                io.Combo.Input(
                    "form",
                    display_name="mode",
                    options=[form.value for form in CallForm],
                    default=CallForm.AUTO.value,
                    optional=True,  # older prompts do not have it
                    advanced=True,
                    tooltip=(
                        "How far to go. fastest: the fastest that is ready. identical pixels: "
                        "compile nothing, only replay repeated steps (CUDA graphs)."
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
    def validate_inputs(cls, graphs: str | None = None, form: str | None = None) -> bool | str:
        """Accept values of `form` in older workflows, which the host would refuse."""
        good = validate_name(graphs)
        return good if good is not True else validate_form(form)

    @classmethod
    @override
    def execute(
        cls,
        model: ModelPatcher,
        when_missing: str,
        graphs: str = "",
        backend: str = AUTO,
        form: str = CallForm.AUTO.value,
    ) -> io.NodeOutput:
        return compiled_or_unchanged(
            model,
            cls.hidden.unique_id,
            lambda engine, progress: engine.compile_model(
                model,
                when_missing=when_missing,
                graphs=graphs.strip(),
                backend=backend,
                form=form,
                on_progress=progress,
            ),
        )


class WarmgraphLoadCompiledGraph(io.ComfyNode):
    """Use the graphs of one folder and never build."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WarmgraphLoadCompiledGraph",
            display_name="Load Compiled Graph",
            category="Warmgraph",
            description=(
                "Runs a model through compiled graphs from a folder that was saved with a "
                "workflow, and never compiles anything. Use it to get a workflow's speed on "
                "another machine with the same sort of card, the same system and the same versions "
                "of PyTorch, CUDA, Triton, Python and Warmgraph, or to be sure that nothing is "
                "compiled."
            ),
            search_aliases=["load compiled graph", "strict", "warmgraph"],
            inputs=[
                io.Model.Input("model", tooltip="The model to speed up. It is not changed."),
                *load_inputs(),
            ],
            outputs=[
                io.Model.Output(
                    display_name="model",
                    tooltip="The same model, running through the folder's compiled graphs.",
                )
            ],
            has_intermediate_output=True,
        )

    @classmethod
    @override
    def validate_inputs(cls, folder: str | None = None) -> bool | str:
        return validate_folder(folder)

    @classmethod
    @override
    def execute(cls, model: ModelPatcher, folder: str, strict: bool) -> io.NodeOutput:
        def attach() -> ModelPatcher:
            return server.get_engine().load_graphs(model, folder, strict=strict)

        return attached_or_unchanged(model, attach)
