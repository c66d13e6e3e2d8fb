"""A transformer in float16 whose blocks overflow: clamped as the host clamps them."""

from __future__ import annotations

import pytest
import torch

from warmgraph_backends.kinds.tolerance import RELATIVE_L2
from warmgraph_tools.inprocess import Host

from ..lab import Lab
from ..transformer_runs import Run

#: Products of a block whose results overflow where their weights are so many times as large.
FACTOR = 300
OVERFLOWING = {
    "zimage": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
}


def _overflow(run: Run) -> None:
    with torch.no_grad():
        for name, weight in run.plain.model.diffusion_model.named_parameters():
            if name.endswith(OVERFLOWING[run.kind]):
                weight.mul_(FACTOR)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OVERFLOWING)
def test_a_model_that_overflows_is_compiled_and_clamped_as_the_hosts(
    host: Host, shared: Lab, kind: str
) -> None:
    """After a sound one, whose first calls were compared, and before the next."""
    for overflows in (False, True, False):
        run = Run(host, shared, kind, dtype=torch.float16)
        if overflows:
            _overflow(run)
        for size in ((8, 8, 1, 13), (12, 10, 2, 5)):
            run.sample(*size)
            assert run.lab.engine.report(run.model)["regions"]["eager"] == 0
            assert max(call.error for call in run.probe.calls) <= RELATIVE_L2["float16"]
