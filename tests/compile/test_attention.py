"""Which attentions of an exported graph may call another kernel; measuring them needs a GPU.

Our own kernel is run by Triton's interpreter, which has float16 but no bfloat16 products;
`tests/gpu` runs it compiled.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from warmgraph_backends.kernels import attention, gpu_time
from warmgraph_backends.torch_api import compiling

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
    """Stands for the measurement: cuDNN's kernel wins over 8 keys; what was measured is noted."""
    measured: list[Any] = []

    def quickest(shapes: Any, measure: Any) -> str | None:
        assert measure is contextlib.nullcontext
        measured.append(shapes)
        return "cudnn" if shapes[1][0][2] == 8 else None

    monkeypatch.setattr(attention, "_quickest", quickest)
    return measured


def test_only_the_attention_that_gains_calls_the_other_kernel(quicker: list[Any]) -> None:
    graph_module = _export()
    assert attention.choose(graph_module, contextlib.nullcontext) == 1
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
    attention.choose(graph_module, contextlib.nullcontext)
    assert _targets(graph_module) == [CUDNN, HOST]
    assert len(quicker) == 1


@pytest.mark.parametrize("options", [{"any_size": True}, {"dtype": torch.float32}], ids=str)
def test_open_sizes_and_full_precision_are_not_measured(
    options: dict[str, Any], quicker: list[Any]
) -> None:
    graph_module = _export(**options)
    assert attention.choose(graph_module, contextlib.nullcontext) == 0
    assert _targets(graph_module) == [HOST, HOST] and quicker == []


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ({"host": 20.0, "cudnn": 19.0, "cross": 12.0}, "cross"),
        ({"host": 50.0, "cudnn": 30.0, "cross": 40.0}, "cudnn"),
        ({"host": 20.0, "cudnn": 11.0, "cross": 19.5}, None),
        ({"host": 20.0, "cudnn": None, "cross": 12.0}, "cross"),
        ({"host": 20.0, "cross": 12.0}, "cross"),
        ({"host": None, "cudnn": 1.0, "cross": 1.0}, None),
        ({"cudnn": 1.0, "cross": 1.0}, None),
    ],
    ids=str,
)
def test_the_kernel_that_saves_most_is_taken_if_it_saves_enough(
    times: dict[str, float | None], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: it took the shapes and was not measured. Not there: it refused them."""
    monkeypatch.setattr(attention, "_runs", lambda shapes: {name: name for name in times})
    monkeypatch.setattr(gpu_time, "microseconds", lambda run: times[run])
    assert attention._quickest((), contextlib.nullcontext) == wanted


def test_our_kernel_needs_a_launcher_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [torch.empty(1, 2, n, 16) for n in (300, 5, 5)]
    assert attention.KERNELS["cross"].takes(*few)
    monkeypatch.setattr(compiling, "OWN_KERNELS", "a setting that torch does not have")
    assert not attention.KERNELS["cross"].takes(*few)


def test_few_keys_are_told_by_their_shapes() -> None:
    def tensors(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.empty(size) for size in sizes]

    few = (1, 2, 5, 16)
    assert attention.has_few_keys(*tensors((1, 2, 300, 16), few, few))
    assert not attention.has_few_keys(*tensors((1, 2, 300, 16), few, (1, 2, 6, 16)))
    assert not attention.has_few_keys(*tensors((1, 4, 300, 16), few, few))
    wide = (1, 2, 5, attention.WIDEST_HEAD + 1)
    assert not attention.has_few_keys(*tensors(wide, wide, wide))
    query, key = tensors((1, 2, 300, 16), few)
    assert not attention.has_few_keys(query, key, torch.empty(1, 2, 16, 5).transpose(2, 3))


_INTERPRETED = """
module.wrap_triton = lambda kernel: kernel  # takes compiled kernels alone

def dense(batch, heads, rows, width):  # as the host makes them: a row holds its heads
    return torch.randn(batch, rows, heads, width).transpose(1, 2)

def apart(batch, heads, rows, width):
    return torch.randn(batch, heads, rows, width)

def within(batch, heads, rows, width):
    return torch.randn(batch + 1, rows + 2, heads, 2 * width)[1:, 1:-1, :, width:].transpose(1, 2)

for dtype in (torch.float16, torch.float32):
    for batch, heads, rows, keys, width in shapes:
        for layouts in ((dense, dense, dense), (apart, dense, within), (within, apart, dense)):
            q, k, v = (
                layout(batch, heads, n, width).mul(4).to(dtype)
                for layout, n in zip(layouts, (rows, keys, keys))
            )
            found = module.cross_attention(q, k, v)
            assert found.dtype == dtype and found.transpose(1, 2).is_contiguous()
            exact = torch.nn.functional.scaled_dot_product_attention(
                q.double(), k.double(), v.double()
            )
            names = [layout.__name__ for layout in layouts]
            note(f"{dtype} {batch, heads, rows, keys, width} {names}", found, exact)
"""
#: batch, heads, rows, keys, width of a head: a prompt, two, one key, none of them whole blocks.
_SHAPES = [(2, 3, 200, 77, 64), (1, 2, 64, 154, 40), (2, 2, 33, 5, 128), (1, 1, 130, 1, 80)]


def test_our_kernel_computes_attention(interpreted: Any) -> None:
    errors = interpreted("cross_attention", _INTERPRETED, _SHAPES)
    assert len(errors) == 6 * len(_SHAPES)
    for name, found in errors.items():
        for error in found:
            assert error <= (1e-3 if "float16" in name else 1e-5), (name, error)
