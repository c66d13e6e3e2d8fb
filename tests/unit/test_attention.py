"""Which attentions of an exported graph may call another kernel; the kernels need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends import attention

CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention.default
HOST = torch.ops.aten.scaled_dot_product_attention.default


class _Attends(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        # The first call names its defaults, as the host does.
        attend = torch.nn.functional.scaled_dot_product_attention
        mask = q.new_zeros(8, 5) if self.options.get("masked") else None
        causal = self.options.get("causal", False)
        whole = attend(
            q, q, q, attn_mask=None, dropout_p=0.0, is_causal=False
        )  # as the host says it
        return whole + attend(q, k, k, mask, is_causal=causal)


def _export(dtype: torch.dtype = torch.float16, *, any_size: bool = False, **options: Any) -> Any:
    rows = torch.export.Dim("rows", min=2, max=64) if any_size else None
    tensors = torch.randn(1, 2, 8, 16, dtype=dtype), torch.randn(1, 2, 5, 16, dtype=dtype)
    shapes = ({2: rows} if any_size else {}, {})
    exported = torch.export.export(
        _Attends(**options), tensors, dynamic_shapes=shapes, strict=False
    )
    return exported.graph_module


def _targets(graph_module: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph_module.graph.nodes if node.target in (CUDNN, HOST)]


@pytest.fixture
def quicker(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands for the measurement: cuDNN's kernel wins at 8 rows; what was measured is noted."""
    measured: list[Any] = []

    def is_quicker(shapes: Any) -> bool:
        measured.append(shapes)
        return bool(shapes[1][0][2] == 8)

    monkeypatch.setattr(attention, "_is_quicker", is_quicker)
    return measured


def test_only_the_attention_that_gains_calls_the_other_kernel(quicker: list[Any]) -> None:
    graph_module = _export()
    assert attention.choose(graph_module) == 1
    assert _targets(graph_module) == [CUDNN, HOST]
    assert len(quicker) == 2
    graph_module.graph.lint()
    [call] = [node for node in graph_module.graph.nodes if node.target is CUDNN]
    assert call.args[3:] == (None, False)
    [result] = call.users
    assert result.meta["val"].shape == (1, 2, 8, 16)


@pytest.mark.parametrize("options", [{"masked": True}, {"causal": True}], ids=str)
def test_masks_stay_with_the_hosts_kernel(options: dict[str, Any], quicker: list[Any]) -> None:
    graph_module = _export(**options)
    attention.choose(graph_module)
    assert _targets(graph_module) == [CUDNN, HOST]
    assert len(quicker) == 1


@pytest.mark.parametrize("options", [{"any_size": True}, {"dtype": torch.float32}], ids=str)
def test_open_sizes_and_full_precision_are_not_measured(
    options: dict[str, Any], quicker: list[Any]
) -> None:
    graph_module = _export(**options)
    assert attention.choose(graph_module) == 0
    assert _targets(graph_module) == [HOST, HOST] and quicker == []
