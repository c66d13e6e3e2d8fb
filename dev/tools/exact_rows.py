"""What int8 weights multiply, in float64: what `kernels.int8_rows` is compared with.

Source: https://arxiv.org/abs/2512.03673, for the rotation; the host's `comfy/ops.py`
(`INPUT_ACT_EAGER`), for the activations.
"""

from __future__ import annotations

import torch

GROUP = 256
_FOUR = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


def hadamard() -> torch.Tensor:
    """Return the regular Hadamard matrix of a group, float64 [GROUP, GROUP], orthogonal."""
    four = torch.tensor(_FOUR, dtype=torch.float64)
    whole = four
    while len(whole) < GROUP:
        whole = torch.kron(whole, four)
    return whole / GROUP**0.5


def exact(rows: torch.Tensor, act: str, *, rotated: bool) -> torch.Tensor:
    """Return rows `[rows, in]` after an activation and the rotation, in float64."""
    found = rows.double()
    if act == "gelu_tanh":
        found = torch.nn.functional.gelu(found, approximate="tanh")
    elif act == "swiglu":
        gate, up = found.chunk(2, -1)
        found = torch.nn.functional.silu(gate) * up
    if rotated:
        found = (found.unflatten(-1, (-1, GROUP)) @ hadamard().to(rows.device)).flatten(-2)
    return found


def assert_quantised(found: tuple[torch.Tensor, torch.Tensor], truth: torch.Tensor) -> None:
    """Assert that int8 values and their scales are the nearest to rows of finite float64.

    Both sides of a middle are near enough, for what is computed in float32.
    """
    values, scales = found
    assert values.dtype is torch.int8 and values.shape == truth.shape
    assert scales.dtype is torch.float32 and scales.shape == (len(truth), 1)
    expected = (truth.abs().amax(1, keepdim=True) / 127.0).clamp(min=1e-30)
    torch.testing.assert_close(scales.double(), expected, rtol=1e-6, atol=0.0)
    assert int(values.abs().max()) <= 127
    distance = (values.double() - truth / expected).abs()
    assert float(distance.max()) <= 0.5 + 1e-4
