"""A block that another node captures into a CUDA graph of its own, within a step of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..measure import rel_l2
from ..pack import ROOT, import_alias, open_engine

KIND = "flux1"
SIZE = (16, 16, 1, 13)


def foreign_capture(*, store: str, workers: int = 0) -> dict[str, Any]:
    """Sample a small Flux whose first block somebody else captures and replays, eager and by ours.

    Returns:
        {"error" (relative L2 beside eager under the same node), "captures": of that node around
        our block, "reasons": why blocks were the host's meanwhile, "after": {"error", "eager":
        places that are the host's in the run behind it}}
    """
    import torch

    import_alias("warmgraph_tools", ROOT / "dev" / "tools")
    from warmgraph_tools import small_transformers as small

    from .small_transformers import _sample

    engine = open_engine(Path(store), workers=workers)
    loaded = small.load(KIND, dtype=torch.bfloat16)
    ours = engine.compile_model(loaded, when_missing="wait")
    plain = _sample(small, KIND, loaded, SIZE)  # libraries take their memory
    graphs: list[Any] = []

    def captured(model: Any) -> Any:
        def block(args: dict[str, Any], around: dict[str, Any]) -> Any:
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], capture_error_mode="thread_local"):
                result = around["original_block"](args)
            graphs[-1].replay()
            return result

        clone = model.clone()
        clone.set_model_patch_replace(block, "dit", "double_block", 0)
        return clone

    expected = _sample(small, KIND, captured(loaded), SIZE)
    before = len(graphs)
    error = rel_l2(_sample(small, KIND, captured(ours), SIZE), expected)
    captures = len(graphs) - before
    reasons = [entry["reason"] for entry in engine.report(ours)["eager"]]
    after = rel_l2(_sample(small, KIND, ours, SIZE), plain)
    left = engine.report(ours)["regions"]["eager"]
    engine.close()
    return {
        "error": error,
        "captures": captures,
        "reasons": reasons,
        "after": {"error": after, "eager": left},
    }
