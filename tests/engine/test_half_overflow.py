"""UNets and VAEs in float16 that overflow are what the host makes of them, compiled.

None but MiniMax H3's VAE bounds what overflows (its attention makes nought of NaN): what overflows
is nobody's image, and others beside it in the batch are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_tools import checkpoints, overflowing
from warmgraph_tools.inprocess import Host
from warmgraph_tools.small_vaes import h3_weights, load_h3

from .lab import Lab, Probe, lab_of_its_own
from .test_ltx_vae import make_ltx
from .test_vae import make_vae
from .test_video_vae import make_wan21

pytestmark = pytest.mark.slow
TOLERANCE = 5e-3
#: By which a weight or a latent is larger than float16 holds.
LOUD = 1e6
HALF = {"dtype": torch.float16}
VAES: dict[str, tuple[Callable[[], Any], Any]] = {
    "image": (lambda: _in_half(make_vae()), torch.Size((2, 4, 6, 5))),
    "wan": (lambda: make_wan21(**HALF), torch.Size((2, 16, 2, 4, 3))),
    "ltx": (lambda: _in_half(make_ltx()), torch.Size((2, 128, 2, 3, 2))),
    "h3": (lambda: load_h3(h3_weights(), **HALF), torch.Size((2, 24, 2, 3, 2))),
}


@pytest.fixture(scope="module")
def half_lab(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine for this module's graphs."""
    yield from lab_of_its_own("half", tmp_path_factory)


@pytest.mark.parametrize("kind", ["narrow15", "narrowxl"])
def test_a_text_that_overflows_is_the_hosts_and_harms_no_other(
    half_lab: Lab, host: Host, kind: str
) -> None:
    """At a graph's first calls, and after sound ones."""
    import comfy.sd

    prefix = "model.diffusion_model."
    weights = {
        name.removeprefix(prefix): weight
        for name, weight in checkpoints.make(kind).items()
        if name.startswith(prefix)
    }
    loaded = comfy.sd.load_diffusion_model_state_dict(weights, model_options=HALF)
    loaded.model.manual_cast_dtype = None  # it computes so on a processor, too
    _, clip, _ = host.load(kind)
    positive, negative = host.encode(clip, "a cat"), host.encode(clip, "blurry")
    probe, found = Probe(), []

    def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        found.append(theirs)
        return overflowing.distance(ours, theirs)

    probe.distance = distance
    model = half_lab.compiled(probe.attach(loaded))
    for overflows in (True, False, True):
        found.clear()
        probe.calls.clear()
        text = overflowing.loud(positive) if overflows else positive
        host.sample(model, text, negative, steps=1, batch=2)
        report = half_lab.engine.report(model)
        assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
        assert max(call.error for call in probe.calls) <= TOLERANCE
        assert all(bool(each.isfinite().all()) for each in found) is not overflows
        assert any(bool(each.isfinite().any()) for each in found)


@pytest.mark.parametrize("kind", VAES)
def test_a_latent_that_overflows_is_the_hosts_and_harms_no_other(half_lab: Lab, kind: str) -> None:
    make, shape = VAES[kind]
    plain = make()
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        vae = half_lab.engine.compile_vae(plain, when_missing="wait")
        for overflows in (True, False, True):
            given = samples.clone()
            given[0] *= LOUD if overflows else 1
            ours, theirs = vae.decode(given.clone()), plain.decode(given.clone())
            report = half_lab.engine.report(vae)
            assert report["regions"]["eager"] == 0, report["eager"]
            assert overflowing.distance(ours, theirs) <= TOLERANCE
            assert bool(theirs.isfinite().all()) is not overflows
            assert bool(theirs[1].isfinite().all())


def test_what_h3s_attention_makes_of_values_that_overflow_is_made_nought(half_lab: Lab) -> None:
    samples = torch.randn((1, 24, 2, 3, 2), generator=torch.Generator().manual_seed(3))
    for overflows in (True, False, True):
        plain = load_h3(h3_weights(), **HALF)
        if overflows:
            for block in plain.first_stage_model.decoder.transformer_blocks:
                attention = block.attn
                rows = attention.to_qkv.weight.unflatten(0, (attention.heads, 3, -1))
                with torch.no_grad():
                    rows[:, 2, ::7] *= LOUD
        with torch.inference_mode():
            vae = half_lab.engine.compile_vae(plain, when_missing="wait")
            ours, theirs = vae.decode(samples), plain.decode(samples)
        report = half_lab.engine.report(vae)
        assert report["regions"]["eager"] == 0, report["eager"]
        assert bool(theirs.isfinite().all())
        assert overflowing.distance(ours, theirs) <= TOLERANCE


def _in_half(vae: Any) -> Any:
    """A VAE that computes in float16, as the host has it by a flag of its command line."""
    vae.vae_dtype = torch.float16
    vae.first_stage_model.to(torch.float16)
    return vae
