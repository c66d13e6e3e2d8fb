"""Nodes that make a VAE run through compiled graphs: Compile VAE and Load Compiled Graph (VAE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io
from typing_extensions import override

from ..backends.attaching.vae import BOTH, PARTS
from ..backends.contract import AUTO
from . import server
from .compile_nodes import (
    attached_or_unchanged,
    compile_inputs,
    compiled_or_unchanged,
    load_inputs,
    validate_folder,
    validate_name,
)

if TYPE_CHECKING:
    from comfy.sd import VAE


class WarmgraphCompileVAE(io.ComfyNode):
    """Compile a VAE's blocks once, for every size, batch and tile."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WarmgraphCompileVAE",
            # The host finds shorter names first, and Compile Model is to be the first of all.
            display_name="Compile VAE (decode, encode)",
            category="Warmgraph",
            description=(
                "Makes decoding and encoding faster, with less memory. Put it between the loader "
                "and VAE Decode, VAE Encode or their tiled versions. The VAE's blocks are compiled "
                "once; from then on every size, batch and tile uses the same compiled graphs, "
                "after a restart as well. What cannot be compiled runs at normal speed, and the "
                "node says why."
            ),
            search_aliases=["torch compile vae", "image decoder", "warmgraph"],
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE to compile. It is not changed."),
                *compile_inputs(),
                io.Combo.Input(
                    "parts",
                    options=list(PARTS),
                    default=BOTH,
                    optional=True,  # else the page would put it before the optional ones
                    advanced=True,
                    tooltip=(
                        "What to compile. The decoder alone is enough for text to image; the "
                        "encoder is used by image to image and inpainting."
                    ),
                ),
            ],
            outputs=[
                io.Vae.Output(
                    display_name="vae",
                    tooltip="The same VAE, running through compiled graphs where there are any.",
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
        vae: VAE,
        when_missing: str,
        graphs: str = "",
        backend: str = AUTO,
        parts: str = BOTH,
    ) -> io.NodeOutput:
        return compiled_or_unchanged(
            vae,
            cls.hidden.unique_id,
            lambda engine, progress: engine.compile_vae(
                vae,
                parts=parts,
                when_missing=when_missing,
                graphs=graphs.strip(),
                backend=backend,
                on_progress=progress,
            ),
        )


class WarmgraphLoadCompiledGraphVAE(io.ComfyNode):
    """Use the graphs of one folder for a VAE and never build."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WarmgraphLoadCompiledGraphVAE",
            display_name="Load Compiled Graph (VAE)",
            category="Warmgraph",
            description=(
                "Runs a VAE through compiled graphs from a folder that was saved with a "
                "workflow, and never compiles anything. Use it to get a workflow's speed on "
                "another machine with the same sort of card, the same system and the same versions "
                "of PyTorch, CUDA, Triton, Python and Warmgraph, or to be sure that nothing is "
                "compiled."
            ),
            search_aliases=["load compiled graph", "strict", "warmgraph"],
            inputs=[
                io.Vae.Input("vae", tooltip="The VAE to speed up. It is not changed."),
                *load_inputs(),
                io.Combo.Input(
                    "parts",
                    options=list(PARTS),
                    default=BOTH,
                    optional=True,  # older prompts do not have it
                    advanced=True,
                    tooltip=(
                        "What runs through compiled graphs; strict asks for no others. Choose what "
                        "Compile VAE had when the folder was saved."
                    ),
                ),
            ],
            outputs=[
                io.Vae.Output(
                    display_name="vae",
                    tooltip="The same VAE, running through the folder's compiled graphs.",
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
    def execute(cls, vae: VAE, folder: str, strict: bool, parts: str = BOTH) -> io.NodeOutput:
        def attach() -> VAE:
            return server.get_engine().load_vae_graphs(vae, folder, parts=parts, strict=strict)

        return attached_or_unchanged(vae, attach)
