"""Group norms on a real GPU: right in a graph for any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.compilers import rewrites
from warmgraph_backends.kernels import norms
from warmgraph_backends.torch_api import tracing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
#: Of a norm's result in these dtypes, which is rounded once.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
#: batch, height, width: of SDXL's levels, of a VAE's last one, odd ones, one pixel.
SIZES = [(2, 128, 128), (2, 32, 32), (1, 512, 512), (3, 33, 7), (1, 1, 1)]
CHANNELS, GROUPS = 320, 32


class _Block(torch.nn.Module):
    """A convolution, a term for each channel, a norm of both."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        where = {"device": "cuda", "dtype": dtype}
        self.conv = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, **where)
        self.norm = torch.nn.GroupNorm(GROUPS, CHANNELS, **where)
        # As workers lay weights out: cuDNN goes by it. (A module of fakes cannot be moved.)
        weight = self.conv.weight.detach().contiguous(memory_format=torch.channels_last)
        self.conv.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        y = self.conv(x) + term[:, :, None, None]
        return torch.nn.functional.silu(self.norm(y))


class _Traced(torch.nn.Module):
    """A block as a worker traces it."""

    def __init__(self, block: _Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        with tracing.cudnn(True), rewrites.tracing("channels_last"):
            result: torch.Tensor = self.block(*given)
        return result


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_norm_after_a_convolution_is_right_at_any_size(dtype: torch.dtype, loaded: Any) -> None:
    """Far from nought, too: there sums of squares would lose what is left of them. Traced as a
    worker does it, with fakes of weights and inputs.
    """
    block = _Block(dtype).eval().requires_grad_(False)

    def inputs(batch: int, height: int, width: int) -> list[torch.Tensor]:
        x = torch.randn(batch, CHANNELS, height, width, device="cuda", dtype=dtype)
        term = 20 * torch.randn(batch, CHANNELS, device="cuda", dtype=dtype)
        return [x.contiguous(memory_format=torch.channels_last), term]

    dims = [torch.export.Dim(name, min=2, max=4096) for name in ("batch", "height", "width")]
    shapes = ({0: dims[0], 2: dims[1], 3: dims[2]}, {0: dims[0]})
    with torch.no_grad(), tracing.size_oblivious(), tracing.fakes_worked_out():
        with tracing.fake_mode():
            twin = _Traced(_Block(dtype)).eval()
            given = tuple(torch.empty_like(each) for each in inputs(2, 64, 48))
        exported = torch.export.export(twin, given, dynamic_shapes=(shapes,), strict=False)
    assert norms.sum_before_terms(exported.graph_module) == 1
    named = dict(_Traced(block).named_parameters())
    weights = [named[name] for name in exported.graph_signature.parameters]
    call, source = loaded(exported.graph_module, [*weights, *inputs(2, 64, 48)])
    assert "_combine" in source
    for size in SIZES:
        x, term = inputs(*size)
        [found] = call([*weights, x, term])
        exact = block.double()(x.double(), term.double())
        block.to(dtype)
        error = float((found.double() - exact).norm() / exact.norm())
        assert error <= TOLERANCE[dtype], (size, error)
