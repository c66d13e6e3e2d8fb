"""Step Cache beside nodes of the host that guide, patch, control and window a model."""

from __future__ import annotations

import pytest
import torch

from ..deepcache.cached import Pair
from ..deepcache.sampling import step_of
from ..deepcache.test_host_nodes import NODES
from .stepped import STEPS, Reference, check

#: Where not all tests run: one that only reads results, one that keeps something, two that make
#: calls of their own.
FEW = {"RescaleCFG", "APG", "PerturbedAttentionGuidance"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in NODES]
)
def test_nodes_of_the_host(xl: Pair, name: str) -> None:
    calls = 2 if name == "PerturbedAttentionGuidance" else 1
    counts = check(xl, xl.patch(name, **NODES[name]))
    assert counts == {"full": 7 * calls, "forecast": 5 * calls}


def test_perpendicular_negative(xl: Pair) -> None:
    patch = xl.patch("PerpNeg", empty_conditioning=xl.prompt(""), neg_scale=0.7)
    assert check(xl, patch) == {"full": 14, "forecast": 10}


def test_differential_diffusion(xl: Pair) -> None:
    mask = torch.linspace(0, 1, 72).expand(1, 64, 72)
    latent = {"samples": torch.full((1, 4, 8, 9), 0.3)}
    latent = xl.node("SetLatentNoiseMask", samples=latent, mask=mask)
    patch = xl.patch("DifferentialDiffusion")
    assert check(xl, patch, latent=latent, denoise=0.8) == {"full": 7, "forecast": 5}


def test_a_lora_that_begins_within_the_run_is_computed_anew(xl: Pair) -> None:
    """As another node schedules it: by keyframes of a hook."""
    from comfy import hooks

    group = hooks.HookGroup()
    hook = hooks.WeightHook(strength_model=1.0, strength_clip=1.0)
    weights = xl.model.model.diffusion_model.out[2].weight
    hook.weights = {"diffusion_model.out.2.weight": ("diff", (torch.full_like(weights, 0.01),))}
    hook.need_weight_init = False
    keyframes = hooks.HookKeyframeGroup()
    keyframes.add(hooks.HookKeyframe(strength=0.0, start_percent=0.0, guarantee_steps=0))
    keyframes.add(hooks.HookKeyframe(strength=1.0, start_percent=0.5, guarantee_steps=0))
    group.add(hook)
    group.set_keyframes_on_hooks(keyframes)
    hooked = [[xl.positive[0][0], {**xl.positive[0][1], "hooks": group}]]
    step = step_of(xl, 0.5, STEPS)
    full = {0, 1, 2, 11}
    anew = Reference({*full, step, step + 1}, anew={step})
    counts = check(xl, full=full, reference=anew, positive=hooked)
    assert counts == {"full": 6, "forecast": 6}
