"""Group norms over images, whose sums are taken before what is added to whole channels."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from warmgraph_backends.compilers import replacements, rewrites
from warmgraph_backends.kernels import norms

pytest.importorskip("triton", reason="Triton is not installed")
OPERATOR = importlib.import_module("warmgraph_backends.kernels.group_moments").OPERATOR
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
    for module in (replacements, rewrites):
        monkeypatch.setattr(module, "is_gpu", lambda _: True)

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


_INTERPRETED = """
module.wrap_triton = lambda kernel: kernel  # takes compiled kernels alone
# The interpreter's own does not suit all of NumPy's versions.
module.range = lambda n: range(int(n.handle.data.item()) if hasattr(n, "handle") else n)

for batch, channels, height, width, groups in shapes:
    images = 0.3 * torch.randn(batch, channels, height, width) + 5 * torch.randn(channels, 1, 1)
    images = images.half().contiguous(memory_format=torch.channels_last)
    addend = torch.randn(batch, 2 * channels).half()[:, channels:]
    added, weight, bias = torch.randn(3, channels).half()
    for terms in ((None, None), (addend, None), (None, added), (addend, added)):
        for scale in ((weight, bias), (None, None)):
            factor, offset = module.group_moments(images, *terms, *scale, groups, 1e-5)
            whole = images.double()
            for term in terms:
                whole = whole if term is None else whole + term.double()[..., None, None]
            scale = [each if each is None else each.double() for each in scale]
            exact = torch.nn.functional.group_norm(whole, groups, *scale, 1e-5)
            found = whole * factor[..., None, None] + offset[..., None, None]
            note(f"{batch, channels, height, width, groups}", found, exact)
"""
#: batch, channels, height, width, groups: many pixels, odd ones, a single one, channels that fill
#: no block.
_SHAPES = [(2, 160, 8, 8, 32), (1, 8, 150, 130, 2), (3, 96, 1, 1, 32), (1, 32, 33, 7, 4)]


def test_our_kernels_compute_a_norm(interpreted: Any) -> None:
    """However far a channel's values are from nought, against the spread of all."""
    errors = interpreted("group_moments", _INTERPRETED, _SHAPES)
    assert len(errors) == len(_SHAPES)
    for name, found in errors.items():
        assert len(found) == 8 and max(found) <= 1e-6, (name, found)
