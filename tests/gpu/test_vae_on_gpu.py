"""Images beyond what 32 bits can count: the second graphs decode and encode them as eager does.

The full-size SDXL VAE in bf16 with random weights. At 4096x4096 its last level has 2**31 elements;
one row of latent less and they all fit into 32 bits there, and one more is beyond in every level.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BF16_REL_L2 = 2e-2
SIZES = [[1024, 1024], [4096, 4088], [4096, 4096], [4096, 4104]]


def test_4096_pixels_and_a_row_more_or_less(lab: Any) -> None:
    result = lab.run(
        "vae_wide",
        ("--bf16-vae",),
        limit_s=400,
        model=lab.model("vae"),
        kind="vae",
        store=lab.store("vae-wide"),
        sizes=SIZES,
    )
    assert "ready" in result["wide"].values(), result["wide"]
    for size, row in result["rows"].items():
        assert row["eager_calls"] == 0, (size, result["report"])
        assert row["decode"] <= BF16_REL_L2 and row["encode"] <= BF16_REL_L2, (size, row)
