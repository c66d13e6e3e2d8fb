"""How the host provides a layer's weights for one call: cast, patched, copied.

Relies on the host's `comfy/ops.py` (`cast_bias_weight`, `uncast_bias_weight`) and
`comfy/model_management.py` (`cast_to`).
"""

from __future__ import annotations

from typing import Any

import torch


def cast(layer: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any, Any]:
    """Return a layer's weight and bias as it would use them, and a token for `let_go`."""
    import comfy.ops

    weight, bias, token = comfy.ops.cast_bias_weight(
        layer, dtype=dtype, device=device, bias_dtype=dtype, offloadable=True
    )
    return weight, bias, token


def bring(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin to copy a weight to a device on the current stream; itself if it is there."""
    import comfy.model_management as management

    quick = management.device_supports_non_blocking(device)
    found: torch.Tensor = management.cast_to(tensor, None, device, non_blocking=quick)
    return found


def finish(
    layer: Any, brought: tuple[Any, Any], dtype: torch.dtype, device: torch.device
) -> tuple[Any, Any]:
    """Cast and patch a layer's weights that were brought over."""
    import comfy.ops

    weight, bias = comfy.ops.cast_bias_weight(
        _Brought(layer, *brought), dtype=dtype, device=device, bias_dtype=dtype
    )
    return weight, bias


def let_go(layer: Any, weight: Any, bias: Any, token: Any) -> None:
    """Tell the host that the work using what `cast` gave is queued."""
    import comfy.ops

    comfy.ops.uncast_bias_weight(layer, weight, bias, token)


class _Brought:
    """A layer with other weights."""

    def __init__(self, layer: Any, weight: Any, bias: Any) -> None:
        self._layer, self.weight, self.bias = layer, weight, bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
