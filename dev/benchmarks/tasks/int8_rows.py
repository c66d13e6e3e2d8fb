"""What int8 weights multiply, made int8: by the library's kernels, and by ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..pack import import_engine
from .common import partial


def int8_rows(*, cases: list[list[Any]]) -> dict[str, Any]:
    """Time both by turns; the library has an activation by itself where it rotates no row.

    Args:
        cases: [rows, width of a result's row, activation by the host's name, rotated].

    Returns:
        {"rows": {"ROWSxWIDTH ...": {"library_ms", "library_gb_s", "ours_ms", "ours_gb_s"}}}: the
        bytes are those of a row's read and of its int8's write, in 10^9 a second.
    """
    import torch

    import_engine()
    from warmgraph_backends.host_api import activations
    from warmgraph_backends.kernels.gpu_time import by_turns
    from warmgraph_backends.kernels.int8_rows import ACTIVATIONS, GROUP, Int8Rows

    if not torch.cuda.is_available():
        return {"rows": {}}
    from comfy_kitchen.backends import cuda as library

    kernel = Int8Rows(torch.device("cuda"))

    def runs(x: torch.Tensor, act: str, rotated: bool) -> dict[str, Callable[[], Any]]:
        def librarys() -> Any:
            if rotated:
                return library.quantize_int8_rowwise_convrot64(x, GROUP, input_act=act or None)
            return library.quantize_int8_rowwise(activations.activated(x, act))

        return {
            "library": librarys,
            "ours": lambda: kernel.quantise(x, act=act, rotated=rotated),
        }

    rows: dict[str, Any] = {}
    for count, width, act, rotated in cases:
        held = width * ACTIVATIONS[act].parts
        x = torch.randn(count, held, device="cuda", dtype=torch.bfloat16)
        moved = count * (2 * held + width)
        row: dict[str, Any] = {}
        for name, ms in by_turns(runs(x, act, rotated), are_short=True, rounds=20).items():
            row.update({f"{name}_ms": round(ms, 4), f"{name}_gb_s": round(moved / ms / 1e6)})
        rows[" ".join([f"{count}x{width}", "rotated" if rotated else "plain", act]).strip()] = row
        partial({"rows": rows})
    return {"rows": rows}
