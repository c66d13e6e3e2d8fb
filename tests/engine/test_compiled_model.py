"""A compiled model makes eager's images, at every size, with not one more build."""

from __future__ import annotations

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .conftest import Lab, relative

TOLERANCE = 1e-4


@pytest.mark.parametrize("kind", ["narrowxl"])
def test_first_build_then_any_size_and_batch(lab: Lab, host: Host, kind: str) -> None:
    model, clip, _ = host.load(kind)
    positive, negative = host.encode(clip, "a cat"), host.encode(clip, "blurry")
    compiled = lab.compiled(model)
    report = lab.engine.report(compiled)
    assert report["regions"]["eager"] == 0, report
    before = lab.builds()
    for width, height, batch in [(64, 64, 1), (360, 480, 2), (264, 200, 3), (64, 512, 1)]:
        size = dict(width=width, height=height, batch=batch)
        eager = host.sample(model, positive, negative, **size)
        ours = host.sample(compiled, positive, negative, **size)
        assert relative(ours, eager) < TOLERANCE
        assert not torch.equal(ours, eager)  # compiled kernels round elsewhere
    assert lab.builds() == before
    assert lab.engine.report(compiled)["regions"]["eager"] == 0
