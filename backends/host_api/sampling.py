"""A sampler's run: its guider's sigmas and conditionings.

Relies on the host's `comfy/samplers.py`, `comfy/controlnet.py`, `comfy/hooks.py` and
`comfy/model_sampling.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def sigma_at(guider: Any, percent: float) -> float:
    """Return the sigma at a fraction of a guider's run."""
    return float(guider.inner_model.model_sampling.percent_to_sigma(percent))


def sampled(guider: Any) -> Any:
    """Return the MODEL that a guider samples, or None."""
    return getattr(guider.inner_model, "current_patcher", None)


def hooks(patcher: Any) -> Any:
    """Return the hooks now acting on a MODEL's weights, or None."""
    return getattr(patcher, "current_hooks", None)


def is_flow(guider: Any) -> bool:
    """Tell whether sigma is the latent's fraction of noise (flow matching), not noise on top."""
    from comfy.model_sampling import CONST

    return isinstance(guider.inner_model.model_sampling, CONST)


def boundaries(guider: Any) -> Iterator[float]:
    """Yield each sigma where a conditioning, its ControlNet or a hook keyframe starts or ends."""
    for conditionings in getattr(guider, "conds", {}).values():
        for conditioning in conditionings:
            ends = [conditioning.get("timestep_start"), conditioning.get("timestep_end")]
            control = conditioning.get("control")
            while control is not None:
                ends += getattr(control, "timestep_range", None) or ()
                control = getattr(control, "previous_controlnet", None)
            for hook in getattr(conditioning.get("hooks"), "hooks", ()):
                ends += [each.start_t for each in hook.hook_keyframe.keyframes]
            yield from (float(each) for each in ends if each is not None)


def ids_of(conditionings: Any) -> Any:
    """Return the host's ids of one role's conditionings, or None."""
    return None if conditionings is None else tuple(each.get("uuid") for each in conditionings)
