"""Which kernel attends on a real GPU, and that it is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from warmgraph_backends.choices import attention_choice, autotuner
from warmgraph_backends.operators import host_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
#: Of a sum of products in bfloat16, and of rounding queries, keys and values to it.
TOLERANCE = 1.6e-2


@pytest.mark.parametrize("chosen", ["host", "cudnn"])
def test_heads_that_share_keys_attend_as_with_copies(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Krea's 48 heads read 12 of keys and values."""
    times = {"host": {"host": 1.0}, "cudnn": {"host": 2.0, "cudnn": 1.0}}[chosen]
    monkeypatch.setattr(autotuner, "by_turns", lambda *_, **__: times)
    shape = (1, 1111, 48, 128)
    query, key, value = (
        torch.randn(*shape[:2], heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads in (48, 12, 12)
    )
    truth = torch.nn.functional.scaled_dot_product_attention(
        *(t.repeat_interleave(48 // t.shape[1], 1).double() for t in (query, key, value))
    )
    choice = attention_choice.AttentionChoice(tmp_path, "card")

    def of_the_host() -> torch.Tensor:
        copies = (host_attention.ungrouped(t, 48) for t in (key, value))
        result = torch.nn.functional.scaled_dot_product_attention(query, *copies)
        return result.transpose(1, 2).flatten(2)

    found = choice.attend(query, key, value, 48, split=True, calls=100, host=of_the_host)
    assert set(choice.ways.chosen.values()) == {chosen}  # cuDNN's was not refused
    difference = (found.double() - truth.transpose(1, 2).flatten(2)).norm() / truth.norm()
    assert difference <= TOLERANCE
