"""The node that makes a CONTROL_NET run through compiled graphs: Compile ControlNet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io
from typing_extensions import override

from ..backends.contract import AUTO
from .compile_nodes import compile_inputs, compiled_or_unchanged, validate_name

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase


class WarmgraphCompileControlNet(io.ComfyNode):
    """Compile a ControlNet's blocks once, for every size, strength and hint."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WarmgraphCompileControlNet",
            display_name="Compile ControlNet",
            category="Warmgraph",
            description=(
                "Makes every step with this ControlNet faster. Put it between Load ControlNet "
                "Model and Apply ControlNet. Most of its compiled graphs are those of the model "
                "that it controls: where Compile Model has been used, one more is compiled. From "
                "then on every size, batch, hint, strength and ControlNet of this architecture "
                "uses the same ones, after a restart as well. What cannot be compiled runs at "
                "normal speed, and the node says why."
            ),
            search_aliases=["torch compile controlnet", "warmgraph"],
            inputs=[
                io.ControlNet.Input(
                    "control_net", tooltip="The ControlNet to compile. It is not changed."
                ),
                *compile_inputs(),
            ],
            outputs=[
                io.ControlNet.Output(
                    display_name="control_net",
                    tooltip=(
                        "The same ControlNet, running through compiled graphs where there are any."
                    ),
                )
            ],
            hidden=[io.Hidden.unique_id],
            has_intermediate_output=True,  # its text comes back when the host's cache serves it
        )

    @classmethod
    @override
    def validate_inputs(cls, graphs: str | None = None) -> bool | str:
        return validate_name(graphs)

    @classmethod
    @override
    def execute(
        cls,
        control_net: ControlBase,
        when_missing: str,
        graphs: str = "",
        backend: str = AUTO,
    ) -> io.NodeOutput:
        return compiled_or_unchanged(
            control_net,
            cls.hidden.unique_id,
            lambda engine, progress: engine.compile_controlnet(
                control_net,
                when_missing=when_missing,
                graphs=graphs.strip(),
                backend=backend,
                on_progress=progress,
            ),
        )
