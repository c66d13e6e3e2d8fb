"""What a conditioning's denoised latent is at a step that is not computed: a velocity along a line
through those of the last two computed steps.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

#: How much longer than the last one between two computed steps the way ahead may be taken for.
_FARTHEST = 3.0


class Forecast(str, Enum):
    """How far a velocity goes on along the line; the value is a user's word."""

    HALF = "half"
    LINE = "line"
    REUSE = "reuse"

    @property
    def share(self) -> float:
        """How much of the line's change counts."""
        return {Forecast.HALF: 0.5, Forecast.LINE: 1.0, Forecast.REUSE: 0.0}[self]


class Computed(NamedTuple):
    """What one evaluation of all conditionings gave.

    Attributes:
        step: in which it was.
        noise: how much of its latent was noise, [1], float32, on the latent's device.
        velocities: (latent - denoised) / sigma of each role, in float32; None where the role has
            no conditioning.
    """

    step: int
    noise: torch.Tensor
    velocities: list[torch.Tensor | None]

    @property
    def bytes(self) -> int:
        """Memory that it holds."""
        return sum(v.numel() * v.element_size() for v in self.velocities if v is not None)


class Kept(NamedTuple):
    """What the last computed steps left of one call: of the last one, and of the one before."""

    last: Computed
    before: Computed | None = None

    @property
    def bytes(self) -> int:
        """Memory that they hold."""
        return self.last.bytes + (0 if self.before is None else self.before.bytes)


def noise_of(sigma: torch.Tensor, *, is_flow: bool) -> torch.Tensor:
    """Return how much of a latent is noise, [1] in float32.

    Args:
        sigma: of each of its images, all the same, [B].
    """
    first = sigma.reshape(-1)[:1].float()
    return first if is_flow else first / (1.0 + first)


def computed(
    step: int,
    latent: torch.Tensor,
    sigma: torch.Tensor,
    denoised: list[torch.Tensor],
    are_there: list[bool],
    *,
    is_flow: bool,
) -> Computed:
    """Take down what an evaluation gave; the latents are copied, for the host may write into them.

    Args:
        latent: as the sampler has it, [B, ...].
        sigma: of it, [B].
        denoised: of each role, like the latent.
        are_there: which roles have a conditioning.
    """
    first = _like(sigma.reshape(-1)[:1].float(), latent)
    velocities = [
        (latent.float() - each.float()) / first if is_there else None
        for each, is_there in zip(denoised, are_there, strict=True)
    ]
    return Computed(step, noise_of(sigma, is_flow=is_flow), velocities)


def forecast(
    before: Computed,
    last: Computed,
    latent: torch.Tensor,
    sigma: torch.Tensor,
    share: float,
    *,
    is_flow: bool,
) -> list[torch.Tensor]:
    """Return what an evaluation would give, of each role, like the latent; nothing of the device is
    read.

    Args:
        before, last: of the last two computed steps.
        latent, sigma: as of `computed`.
        share: how much of the line's change counts.
    """
    first = _like(sigma.reshape(-1)[:1].float(), latent)
    ahead = noise_of(sigma, is_flow=is_flow) - last.noise
    way = last.noise - before.noise
    far = (ahead / torch.where(way == 0, 1.0, way)).clamp(0.0, _FARTHEST)  # back: not at all
    weight = _like(share * torch.where(way == 0, 0.0, far), latent)
    found = []
    for older, newer in zip(before.velocities, last.velocities, strict=True):
        if older is None or newer is None:
            found.append(torch.zeros_like(latent))  # as the host gives it
            continue
        velocity = newer + weight * (newer - older)
        found.append((latent.float() - first * velocity).to(latent.dtype))
    return found


def _like(number: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    return number.to(latent.device).view(-1, *[1] * (latent.dim() - 1))
