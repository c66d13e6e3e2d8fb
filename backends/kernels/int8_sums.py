"""Products of int8 rows by int8 weights in plain maths, for any device: the reference of our
kernel.
"""

from __future__ import annotations

import torch


def multiply(
    rows: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Return `rows * scales @ (weight * weight_scales).T + bias`, of exact sums.

    The sums are whole numbers, which float64 represents up to 2**53.

    Args:
        rows: int8 [count, width / 16, 16].
        scales: float32 [count, 1], of each row.
        weight: int8 [columns / 16, 16, width / 16, 16].
        weight_scales: float32 [columns / 16, 16], likewise.
        bias: [columns / 16, 16].

    Returns:
        [count, columns / 16, 16], in the dtype of the bias.
    """
    exact = torch.promote_types(bias.dtype, torch.float32)
    columns = weight.flatten(2).flatten(0, 1).double()
    sums = (rows.flatten(1).double() @ columns.T).to(exact)
    values = sums * scales * weight_scales.flatten() + bias.flatten().to(exact)
    return values.to(bias.dtype).view(rows.shape[0], *bias.shape)
