"""The extension class that the host loads, and the list of its nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io
from typing_extensions import override

from . import server
from .compile_controlnet import WarmgraphCompileControlNet
from .compile_model import WarmgraphCompileModel, WarmgraphLoadCompiledGraph
from .compile_report import WarmgraphGraphReport, WarmgraphWarmUp
from .compile_vae import WarmgraphCompileVAE, WarmgraphLoadCompiledGraphVAE
from .deepcache import WarmgraphDeepCache
from .stepcache import WarmgraphStepCache


class WarmgraphExtension(ComfyExtension):
    """Registers the pack's folder, routes and nodes."""

    @override
    async def on_load(self) -> None:
        server.register()

    @override
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            WarmgraphCompileModel,
            WarmgraphLoadCompiledGraph,
            WarmgraphGraphReport,
            WarmgraphWarmUp,
            WarmgraphCompileVAE,
            WarmgraphLoadCompiledGraphVAE,
            WarmgraphCompileControlNet,
            WarmgraphDeepCache,
            WarmgraphStepCache,
        ]
