"""Warmgraph for ComfyUI: compile once, stay warm."""

from __future__ import annotations

from .nodes import WarmgraphExtension

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint() -> WarmgraphExtension:
    """Hand the host this pack's extension."""
    return WarmgraphExtension()
