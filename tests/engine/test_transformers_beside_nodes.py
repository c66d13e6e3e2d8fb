"""What the host's own nodes do to transformers, before Compile Model and after it: the image is the
one that they make without us, at no build.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative

STEPS = 4
FRAMES = 9
Apply = Callable[[Any], Any]


def shift_flux(model: Any) -> Any:
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    (found,) = ModelSamplingFlux().patch(model, 1.15, 0.5, 128, 96)
    return found


def shift_sd3(model: Any) -> Any:
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    (found,) = ModelSamplingSD3().patch(model, 3.0)
    return found


def shift_aura(model: Any) -> Any:
    from comfy_extras.nodes_model_advanced import ModelSamplingAuraFlow

    (found,) = ModelSamplingAuraFlow().patch_aura(model, 6.0)
    return found


def scale_rotation(model: Any) -> Any:
    from comfy_extras.nodes_rope import ScaleROPE

    return ScaleROPE.execute(model, 1.5, 2.0, 0.5, 0.0, 1.0, 0.0).result[0]


def easy_cache(model: Any) -> Any:
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, 3.0, 0.1, 0.95, False).result[0]


def lazy_cache(model: Any) -> Any:
    from comfy_extras.nodes_easycache import LazyCacheNode

    return LazyCacheNode.execute(model, 3.0, 0.1, 0.95, False).result[0]


def windows(model: Any) -> Any:
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    node = WanContextWindowsManualNode
    return node.execute(model, 17, 8, "standard_static", 1, False, "pyramid", False).result[0]


def rescale_guidance(model: Any) -> Any:
    from comfy_extras.nodes_model_advanced import RescaleCFG

    (found,) = RescaleCFG().patch(model, 0.7)
    return found


def skip_layers(model: Any) -> Any:
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    return SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, "1", "1").result[0]


def normalised_guidance(model: Any) -> Any:
    from comfy_extras.nodes_nag import NAGuidance

    return NAGuidance.execute(model, 5.0, 0.5, 1.5).result[0]


def two_adapters(model: Any) -> Any:
    """A LoRA with a DoRA scale, and a LoKr, as files hold them."""
    import comfy.lora

    draw = torch.Generator().manual_seed(9)

    def random(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(*shape, generator=draw)

    first, second = "double_blocks.0.img_mlp.0", "single_blocks.1.linear2"
    weights = dict(model.model.diffusion_model.named_parameters())
    rows, columns = weights[f"{first}.weight"].shape
    outer, inner = weights[f"{second}.weight"].shape
    file = {
        "a.lora_up.weight": random(rows, 4),
        "a.lora_down.weight": random(4, columns),
        "a.alpha": torch.tensor(4.0),
        "a.dora_scale": 1 + random(rows, 1),
        "b.lokr_w1": random(2, 2),
        "b.lokr_w2": random(outer // 2, inner // 2),
    }
    names = {"a": f"diffusion_model.{first}.weight", "b": f"diffusion_model.{second}.weight"}
    patches = comfy.lora.load_lora(file, names)
    clone = model.clone()
    assert sorted(clone.add_patches(patches, 0.8)) == sorted(names.values())
    return clone


class Case(NamedTuple):
    """A node on a kind of model.

    Attributes:
        reason: why some blocks are the host's under it; None where all stay compiled.
    """

    kind: str
    apply: Apply
    reason: str | None = None


CASES = (
    Case("flux2", shift_flux),
    Case("zimage", shift_aura),
    Case("zimage", scale_rotation),
    Case("wan", easy_cache),
    Case("zimage", lazy_cache),
    Case("wan", windows),
    Case("zimage", rescale_guidance),
    Case("flux2", skip_layers),
    Case("flux2", normalised_guidance, "another node patches attn1_output_patch"),
    Case("flux2", two_adapters),
)
MORE_CASES = (
    Case("wan", shift_sd3),
    *(Case(kind, scale_rotation) for kind in ("flux2", "wan")),
    Case("flux2", easy_cache),
)


def _sample(host: Host, kind: str, model: Any) -> torch.Tensor:
    frames = FRAMES if transformers.KINDS[kind].is_video else 1
    result: torch.Tensor = host.sample(
        model,
        transformers.conditioning(kind, 13),
        transformers.conditioning(kind, 13, seed=2),
        latent=transformers.latent(kind, 8, 12, frames=frames),
        steps=STEPS,
        cfg=3.0,
        scheduler="simple",
    )
    assert result.isfinite().all()
    return result


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)],
    ids=lambda case: f"{case.kind}-{case.apply.__name__}",
)
def test_the_hosts_nodes_make_their_image(host: Host, shared: Lab, case: Case) -> None:
    engine, kind, apply = shared.engine, case.kind, case.apply
    plain = transformers.load(kind)
    ours = shared.compiled(plain)  # builds what no test before it did
    jobs = shared.jobs()
    without, eager = (_sample(host, kind, model) for model in (plain, apply(plain)))
    assert relative(eager, without) > 1e-3, "the node must change the image"
    for model in (apply(ours), shared.compiled(apply(plain))):
        before = engine.report(model)["calls"]
        assert relative(_sample(host, kind, model), eager) <= 10 * TOLERANCE
        report = engine.report(model)
        assert report["calls"]["eager"] == before["eager"]
        assert report["calls"]["compiled"] > before["compiled"]
        reasons = {entry["reason"] for entry in report["eager"]}
        assert reasons == ({case.reason} if case.reason else set())
    assert relative(_sample(host, kind, ours), without) <= 10 * TOLERANCE
    assert shared.jobs() == jobs


def test_two_models_of_one_prompt_share_their_graphs(host: Host, shared: Lab) -> None:
    """As Wan 2.2 is run: one model for the noisy steps, another one for the rest."""
    plain = [transformers.load("wan", seed=seed) for seed in (0, 1)]
    high, low = (shared.compiled(model) for model in plain)
    jobs = shared.jobs()
    prompts = [transformers.conditioning("wan", 13, seed=seed) for seed in (1, 2)]
    latent = transformers.latent("wan", 8, 12, frames=FRAMES)

    def image(*models: Any) -> torch.Tensor:
        parts, steps = [(0, 2), (2, 4)], 4
        result: torch.Tensor = host.sample_parts(
            list(models), *prompts, parts, steps=steps, latent=latent, scheduler="simple"
        )
        return result

    eager = image(*plain)
    assert relative(image(high, low), eager) <= 10 * TOLERANCE
    assert relative(image(low, high), eager) > 1e-2
    for model in (high, low):
        report = shared.engine.report(model)
        assert report["regions"]["eager"] == 0 and report["calls"]["compiled"] > 0
    assert shared.jobs() == jobs
