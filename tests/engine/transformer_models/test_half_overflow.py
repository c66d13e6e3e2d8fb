"""Transformers in float16 that overflow are what the host makes of them, compiled.

Where the host does something about it, in what is compiled (0.30), besides float32 between blocks:

| place | what it does | in a graph |
| --- | --- | --- |
| flux/layers.py, DoubleStreamBlock | bounds the text that it gives | double |
| flux/layers.py, SingleStreamBlock | bounds what it gives | single |
| flux/model.py, between both | bounds the image that the double blocks gave | host's; they round |
| lumina/model.py, clamp_fp16 | bounds attention, feed-forward, and what that gates | block |
| minimax/vae.py, Attention | makes nought of NaN that attention gave | block |
| hunyuan_video/model.py, TokenRefiner | sums a text in float32 | host's |
| cosmos/predict2.py | float32 between blocks | as it comes |
| lightricks/model.py, av_model.py | float32 in what positions and masks are made of | host's |

Nothing bounds what another graph gave unless that graph rounds as eager does, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from warmgraph_backends.kinds.tolerance import RELATIVE_L2
from warmgraph_tools import overflowing
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from ..av_runs import AvRun
from ..lab import Lab
from ..transformer_runs import Run

pytestmark = pytest.mark.slow
TOLERANCE = RELATIVE_L2["float16"]
#: A share of what is bounded, at the least, that is infinite.
SHARE = 0.02
SIZES = ((12, 10, 2, 5), (8, 8, 1, 13))
AUDIO_VIDEO = ("ltxv", "ltx23", "h3_curves")
#: One of each sort of block that the host lets overflow.
UNBOUNDED = (
    *("qwen", "qwen21", "krea", "sd3", "wan", "wan_image", "wan_5b", "wan_vace", "wan_humo"),
    *("anima", "predict2_video"),
    *AUDIO_VIDEO,
)


class _Bounds(TorchDispatchMode):
    """Notes the shares of infinite elements of all that is bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "nan_to_num" in str(func):
            self.shares.append(float(args[0].isinf().float().mean()))
        return func(*args, **(kwargs or {}))


def _is_bounded(run: Run) -> bool:
    """Whether the host's own code bounds what overflows in a call."""
    with _Bounds() as bounds:
        run.sample(*SIZES[0], frames=2, model=run.plain)
    return max(bounds.shares) > SHARE


def _all_compiled(run: Run | AvRun) -> None:
    report = run.lab.engine.report(run.model)
    assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
    assert report["calls"]["compiled"] > 0


@pytest.mark.parametrize("kind", overflowing.BOUNDED)
def test_weights_that_overflow_are_compiled_and_bounded_as_the_hosts(
    host: Host, shared: Lab, kind: str
) -> None:
    """At a graph's first calls, and after those of a sound model."""
    for overflows in (True, False, True):
        run = Run(host, shared, kind, dtype=torch.float16)
        run.probe.distance = overflowing.distance
        if overflows:
            overflowing.enlarge(run.plain.model.diffusion_model, kind)
            assert _is_bounded(run)
        for size in SIZES:
            run.sample(*size, frames=2)
            _all_compiled(run)
            assert max(call.error for call in run.probe.calls) <= TOLERANCE


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_text_that_overflows_is_the_hosts_and_harms_no_other(
    host: Host, shared: Lab, kind: str
) -> None:
    """One prompt's, of two: at a graph's first calls, and after sound ones."""
    if not transformers.is_there(kind):
        pytest.skip(f"this ComfyUI has no {kind}")
    of = AvRun if kind in AUDIO_VIDEO else Run
    run = of(host, shared, kind, transformers.load(kind, dtype=torch.float16))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        found.append((ours, theirs))
        return overflowing.distance(ours, theirs)

    run.probe.distance = distance
    height, width, batch, tokens = SIZES[0]
    batch = 1 if kind.startswith("h3") else batch  # it takes no more
    extras = transformers.extras(kind, height, width, 3)
    size = {"height": height, "width": width, "batch": batch, "frames": 3}
    for overflows in (True, False, True):
        found.clear()
        prompt = transformers.conditioning(kind, tokens, **extras)
        host.sample(
            run.model,
            overflowing.loud(prompt) if overflows else prompt,
            transformers.conditioning(kind, tokens, seed=2, **extras),
            latent=transformers.latent(kind, **size),
            steps=1,
            cfg=3.0,
            scheduler="simple",
        )
        _all_compiled(run)
        assert max(overflowing.distance(*pair) for pair in found) <= TOLERANCE
        assert all(bool(theirs.isfinite().all()) for _, theirs in found) is not overflows
        assert any(bool(theirs.isfinite().any()) for _, theirs in found)
