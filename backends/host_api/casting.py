"""How the host gives a layer's weights for one call: cast, patched, brought over.

Relies on the host's `comfy/ops.py` (`cast_bias_weight`, `uncast_bias_weight`).
"""

from __future__ import annotations

from typing import Any

import torch


def cast(layer: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any, Any]:
    """Return a layer's weight and bias as it would compute with them, and what `let_go` takes."""
    import comfy.ops

    weight, bias, token = comfy.ops.cast_bias_weight(
        layer, dtype=dtype, device=device, bias_dtype=dtype, offloadable=True
    )
    return weight, bias, token


def cast_in_order(layer: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """As `cast`, behind the work that is queued already: nothing is to be let go of."""
    import comfy.ops

    weight, bias = comfy.ops.cast_bias_weight(layer, dtype=dtype, device=device, bias_dtype=dtype)
    return weight, bias


def let_go(layer: Any, weight: Any, bias: Any, token: Any) -> None:
    """Tell the host that the work which uses what `cast` gave is queued."""
    import comfy.ops

    comfy.ops.uncast_bias_weight(layer, weight, bias, token)


def is_in_buffer(token: Any) -> bool:
    """Tell whether what `cast` gave lies where the next cast on the same stream writes."""
    from comfy.cli_args import args

    return token is not None and token[0] is not None and not args.cuda_malloc
