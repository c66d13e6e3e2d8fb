"""GGUF files through the pack that people load them with, which must lie in the host's folder of
custom nodes. Of its code the layers and the reader are used: its nodes need the whole host.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from .pack import ROOT, import_alias

PACK = "ComfyUI-GGUF"
SOURCE = "https://github.com/city96/ComfyUI-GGUF"
_ALIAS = "benchmarked_gguf"


def load(path: Path, *, metadata: dict[str, str] | None = None) -> Any:
    """Return the MODEL of a file.

    Args:
        metadata: what the host's detection is told beside the weights.

    Raises:
        RuntimeError: the pack is not there.
    """
    import comfy.sd

    ops, loader = _module("ops"), _module("loader")
    found = loader.gguf_sd_loader(str(path))
    weights = found[0] if isinstance(found, tuple) else found
    options = {"custom_operations": ops.GGMLOps()}
    return comfy.sd.load_diffusion_model_state_dict(
        weights, model_options=options, metadata=metadata
    )


def beside_weights(model: Any) -> Any:
    """Move what a LoRA adds to weights in blocks from the MODEL to the weights, as the pack's own
    ModelPatcher does when it is loaded; returns the model.
    """
    for key in list(model.patches):
        layer = model.model.get_submodule(key.rpartition(".")[0])
        if hasattr(layer, "is_ggml_quantized") and layer.is_ggml_quantized():
            layer.weight.patches = [(model.patches.pop(key), key)]
    return model


def write(
    path: Path, weights: dict[str, Any], form: str, architecture: str, *, device: str = "cpu"
) -> int:
    """Write a file as `dev/tools/gguf_files.py` does; returns its size in bytes."""
    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    from warmgraph_tools import gguf_files

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    gguf_files.write(part, weights, form, architecture=architecture, device=device)
    part.replace(path)
    return path.stat().st_size


def load_small(kind: str, form: str) -> Any:
    """Return the MODEL of a file of a small twin, a Wan."""
    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    from warmgraph_tools import small_transformers

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.gguf"
        write(path, small_transformers.weights(kind), form, kind)
        said = json.dumps({"transformer": {"text_dim": 64}})
        return load(path, metadata={"config": said})


def _module(name: str) -> Any:
    import comfy

    folder = Path(comfy.__path__[0]).parent / "custom_nodes" / PACK
    if not (folder / "ops.py").is_file():
        raise RuntimeError(f"the pack {PACK} must lie in {folder}: git clone {SOURCE}")
    if _ALIAS not in sys.modules:
        package = types.ModuleType(_ALIAS)
        package.__path__ = [str(folder)]
        sys.modules[_ALIAS] = package
    return importlib.import_module(f"{_ALIAS}.{name}")
