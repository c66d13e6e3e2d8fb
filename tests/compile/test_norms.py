"""Group norms over images, whose sums are taken before what is added to whole channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from warmgraph_backends.compilers import rewrites  # noqa: E402
from warmgraph_backends.kernels import norms  # noqa: E402
from warmgraph_backends.kernels.group_moments import OPERATOR  # noqa: E402

GROUPS, CHANNELS = 4, 16
SIDE = torch.export.Dim("side", min=2, max=512)
BATCH = torch.export.Dim("batch", min=2, max=16)


class Block(torch.nn.Module):
    """A convolution, a term for each channel, a norm; what was summed is read once more."""

    def __init__(self, *, has_bias: bool, adds: str) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=has_bias)
        self.norm = torch.nn.GroupNorm(GROUPS, CHANNELS)
        self.adds = adds

    def forward(self, x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if self.adds == "per channel":
            y = y + term[:, :, None, None]
        elif self.adds == "per pixel":
            y = y + x
        return self.norm(y) + y


class _Plain(torch.fx.Interpreter):
    """Runs a graph with plain maths for the operator."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not OPERATOR:
            return super().call_function(target, args, kwargs)
        images, addend, added, weight, bias, groups, epsilon = args
        whole = images
        for term in (addend, added):
            if term is not None:
                whole = whole + (term if term.dim() == 2 else term[None])[:, :, None, None]
        grouped = whole.reshape(whole.shape[0], groups, -1)
        variance, mean = torch.var_mean(grouped, 2, correction=0)
        each = whole.shape[1] // groups
        factor = torch.rsqrt(variance + epsilon).repeat_interleave(each, 1) * weight
        return factor, bias - mean.repeat_interleave(each, 1) * factor


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exports a block as for a GPU."""
    monkeypatch.setattr(rewrites, "is_gpu", lambda _: True)

    def export(block: Block) -> torch.fx.GraphModule:
        inputs = (
            torch.randn(3, CHANNELS, 6, 6).contiguous(memory_format=torch.channels_last),
            torch.randn(3, CHANNELS),
        )
        shapes = ({0: BATCH, 2: SIDE, 3: SIDE}, {0: BATCH})
        with torch.no_grad(), rewrites.tracing("channels_last"):
            program = torch.export.export(
                block.to(memory_format=torch.channels_last), inputs, dynamic_shapes=shapes
            )
        return program.module()

    return export


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("adds", ["per channel", "per pixel", "nothing"])
def test_a_norm_is_told_what_is_added_to_its_channels(
    exported: Any, adds: str, has_bias: bool
) -> None:
    """For any size, with the same outcome."""
    block = Block(has_bias=has_bias, adds=adds).eval()
    graph_module = exported(block)

    told = norms.sum_before_terms(graph_module)

    (node,) = (n for n in graph_module.graph.nodes if n.target is OPERATOR)
    images, addend, added, *_ = node.args
    assert told == (adds == "per channel" or (adds == "nothing" and has_bias))
    assert (addend is not None) == (adds == "per channel")
    assert (added is not None) == (has_bias and adds != "per pixel")
    if adds != "per pixel":
        assert images.target in (torch.ops.aten.conv2d.default, torch.ops.aten.convolution.default)
        assert images.args[2:3] in ((None,), ())
    for size in (4, 11):
        x = torch.randn(2, CHANNELS, size, size).contiguous(memory_format=torch.channels_last)
        term = torch.randn(2, CHANNELS)
        with torch.no_grad():
            result = _Plain(graph_module).run(x, term)
            torch.testing.assert_close(result, block(x, term), rtol=1e-4, atol=1e-4)

