"""Weights of GGUF files on a real GPU: unpacked by our graphs to the last bit, and captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.families import packed_weight
from warmgraph_backends.kernels.packed_blocks import FORMATS, Packed, unpack
from warmgraph_backends.torch_api import tracing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
NAMES = [name for name, form in FORMATS.items() if form.is_packed]
COUNTS = (1, 3, 1000, 2**16 + 5)


class _Unpacked(torch.nn.Module):
    """The form's own maths."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._form = packed_weight.FORMS[name]

    def forward(self, blocks: torch.Tensor) -> torch.Tensor:
        return self._form.reference(self, blocks)  # type: ignore[no-any-return]


def _blocks(name: str, count: int) -> torch.Tensor:
    """Blocks whose numbers are all finite."""
    form = FORMATS[name]
    blocks = torch.randint(0, 256, (count, form.size), device="cuda", dtype=torch.uint8)
    while True:
        found = unpack(blocks, form, torch.float16, torch.float32)
        bad = ~found.isfinite().all(1)
        if not bad.any():
            return blocks
        again = torch.randint_like(blocks, 0, 256)
        blocks = torch.where(bad[:, None], again, blocks)


@torch.no_grad()
@pytest.mark.parametrize("steps", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_gives_the_numbers_of_plain_maths(
    loaded: Any, name: str, steps: torch.dtype
) -> None:
    """With steps in fp16 to the last bit; in float32 a multiplication and what follows are one."""
    asked = packed_weight.name_of(name, str(steps).removeprefix("torch."), "bfloat16")
    example = _blocks(name, 4096)
    blocks = torch.export.Dim("blocks", min=2, max=FORMATS[name].most)
    with tracing.size_oblivious():
        exported = torch.export.export(
            _Unpacked(asked), (example,), dynamic_shapes=({0: blocks},), strict=False
        )
    call, _ = loaded(exported.graph_module, [example])
    for count in COUNTS:
        given = _blocks(name, count)
        (found,) = call([given])
        exact = unpack(given, FORMATS[name], steps, torch.bfloat16)
        assert found.shape == exact.shape and found.dtype is torch.bfloat16
        if steps is torch.float16:
            assert torch.equal(found, exact)
        else:
            scale = exact.float().abs().amax(dim=1, keepdim=True)
            assert ((found.float() - exact.float()).abs() <= 0.01 * scale).all()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_product_by_plain_maths_is_captured(name: str) -> None:
    """Nothing in it comes from the processor's memory."""
    form = FORMATS[name]
    count = 512 // form.width * 64
    weight = Packed(_blocks(name, count), form, torch.float16, torch.Size((64, 512)), torch.float16)
    x, bias = torch.randn(8, 512, device="cuda").half(), torch.randn(64, device="cuda")
    eager = weight.multiply(x, bias)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        weight.multiply(x, bias)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = weight.multiply(x, bias)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)
