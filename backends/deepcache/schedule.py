"""Which steps of a sampler run compute the whole UNet; the others reuse its deep feature.

Steps are numbered from 0 as the sampler makes them. Outside of the chosen part of a run every step
is full, and so is the first within it, as there is nothing to reuse yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import torch


class Schedule(str, Enum):
    """How full steps are chosen."""

    UNIFORM = "uniform"
    QUADRATIC = "quadratic"
    ADAPTIVE = "adaptive"
    CUSTOM = "custom"


class Drift:
    """The adaptive schedule: a step is full once the latent is far from the last full step's.

    The distance is the mean absolute difference over the mean absolute value of the sampler's
    latent. (The UNet's input is scaled to the same size at every sigma, which hides how much of the
    image is decided at high sigma.) The number is read from the GPU once per step.
    """

    def __init__(self, threshold: float) -> None:
        """Set up; no step yet.

        Args:
            threshold: how far a latent may drift, 0 to 1; at 0 every step is full.
        """
        self._threshold = threshold
        self._step: int | None = None
        self._decided = True
        self._last_full: torch.Tensor | None = None

    def is_full(self, step: int, x: torch.Tensor, sigmas: torch.Tensor | None) -> bool:
        """Tell whether a step is full; its first call decides.

        Args:
            x: the UNet's input in this call.
            sigmas: of this step, all the same; None where the host gives none.
        """
        if step == self._step:
            return self._decided
        latent = x.float()
        if sigmas is not None:
            latent = latent * (1 + sigmas.flatten()[:1].to(latent).square()).sqrt()
        self._step, self._decided = step, self._is_far(latent)
        if self._decided:
            self._last_full = latent.clone()  # the host may write into it
        return self._decided

    def _is_far(self, latent: torch.Tensor) -> bool:
        last = self._last_full
        if last is None or last.shape != latent.shape or last.device != latent.device:
            return True
        drift = (latent - last).abs().mean() / last.abs().mean()
        return not float(drift) < self._threshold


def uniform(steps: range, interval: int) -> frozenset[int]:
    """Every `interval`-th step."""
    return frozenset(steps[::interval])


def quadratic(steps: range, interval: int, *, center: float, power: float) -> frozenset[int]:
    """As many full steps as `uniform`, denser around one moment of the run.

    The non-uniform schedule of the DeepCache paper (section 3.3): evenly spaced numbers, raised to
    a power on both sides of the centre.

    Args:
        center: where they are closest, as a share of the steps.
        power: how much closer; 1 is even.
    """
    total = len(steps)
    count = math.ceil(total / interval)
    middle = center * total
    low, high = _root(-middle, power), _root(total - middle, power)
    numbers = [low + (high - low) * n / count for n in range(count)]
    wanted = [round(_root(number, 1.0 / power) + middle) for number in numbers]
    chosen: list[int] = []
    for n, step in enumerate(wanted):  # each distinct, with room for the later ones
        after_last = chosen[-1] + 1 if chosen else 0
        chosen.append(min(max(step, after_last), total - (count - n)))
    return frozenset(steps[n] for n in chosen)


def custom(steps: range, numbers: Sequence[int]) -> frozenset[int]:
    """The steps with these numbers, counted from the run's first step; those outside are none."""
    return frozenset({*numbers, *steps[:1]} & set(steps))


def _root(number: float, power: float) -> float:
    """The root of a number's size, with its sign."""
    return math.copysign(abs(number) ** (1.0 / power), number)
