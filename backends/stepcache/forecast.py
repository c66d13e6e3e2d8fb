"""Forecasts a conditioning's denoised latent: its velocity follows a line through those of the last
two computed steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from .schedule import FARTHEST

#: How much of the line's change counts at least, and while nothing tells.
_LEAST = 0.5


class Forecast(str, Enum):
    """How far a velocity follows the line; the value is the node's choice."""

    AUTO = "auto"
    HALF = "half"
    LINE = "line"
    REUSE = "reuse"

    @property
    def share(self) -> float | None:
        """The share of the line's change; None: what would have been best for the last computed
        step, at least half.
        """
        return {"auto": None, "half": 0.5, "line": 1.0, "reuse": 0.0}[self.value]


class Computed(NamedTuple):
    """The result of one evaluation of all conditionings.

    Attributes:
        step: of the evaluation.
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
    """What is kept of one call in the last computed steps.

    Attributes:
        last, before: of the last one, and of the one before.
        shares: by role, the share of the line's change that would have been best for the last one,
            [B, 1...], on the device; None until three steps are computed.
    """

    last: Computed
    before: Computed | None = None
    shares: list[torch.Tensor | None] | None = None

    @property
    def bytes(self) -> int:
        """Memory that they hold."""
        return self.last.bytes + (0 if self.before is None else self.before.bytes)

    def then(self, now: Computed) -> Kept:
        """Return what is kept after one more; a step's last evaluation replaces its first."""
        if self.last.step == now.step:
            return self._replace(last=now)
        return Kept(now, self.last, best_shares(self, now))


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
    """Keep an evaluation's result; latents are copied, because the host may write into them.

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
    kept: Kept,
    latent: torch.Tensor,
    sigma: torch.Tensor,
    share: float | None,
    *,
    is_flow: bool,
) -> list[torch.Tensor]:
    """Return the forecast result of an evaluation, by role, like the latent; reads nothing from the
    device.

    Args:
        kept: of two computed steps.
        latent, sigma: as of `computed`.
        share: of the line's change; None: the best one for the last computed step, a half if
            unknown.
    """
    last, before = kept.last, kept.before
    if before is None:
        raise ValueError("kept must be of two computed steps, got one")
    first = _like(sigma.reshape(-1)[:1].float(), latent)
    far = _like(_ahead(before, last, noise_of(sigma, is_flow=is_flow)), latent)
    shares: Sequence[Any] = kept.shares or [_LEAST] * len(last.velocities)
    if share is not None:
        shares = [share] * len(shares)
    found = []
    for older, newer, each in zip(before.velocities, last.velocities, shares, strict=True):
        if older is None or newer is None:
            found.append(torch.zeros_like(latent))  # in the host's form
            continue
        velocity = newer + far * each * (newer - older)
        found.append((latent.float() - first * velocity).to(latent.dtype))
    return found


def best_shares(kept: Kept, now: Computed) -> list[torch.Tensor | None] | None:
    """Return the share of a line's change that would have forecast the next computed step best, by
    role and image; reads nothing from the device.

    Args:
        kept: of the two computed steps before.
        now: the result of the step after them.

    Returns:
        By least squares over an image, from a half to 1, [B, 1...]; None without two. Less than a
            half would fit a step of a sampler that adds noise, but makes its image worse.
    """
    if kept.before is None:
        return None
    far = _ahead(kept.before, kept.last, now.noise)
    found: list[torch.Tensor | None] = []
    roles = zip(kept.before.velocities, kept.last.velocities, now.velocities, strict=True)
    for older, newer, new in roles:
        if older is None or newer is None or new is None:
            found.append(None)
            continue
        line = (newer - older) * _like(far, new)
        dims = tuple(range(1, line.dim()))
        along = (line * (new - newer)).sum(dims, keepdim=True)
        long = line.square().sum(dims, keepdim=True)
        found.append((along / torch.where(long == 0, 1.0, long)).clamp(_LEAST, 1.0))
    return found


def _ahead(before: Computed, last: Computed, noise: torch.Tensor) -> torch.Tensor:
    """The distance along the line, in units of that between the two; backwards counts as 0."""
    way = last.noise - before.noise
    far = (noise - last.noise) / torch.where(way == 0, 1.0, way)
    return torch.where(way == 0, 0.0, far.clamp(0.0, FARTHEST))


def _like(number: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    return number.to(latent.device).view(-1, *[1] * (latent.dim() - 1))
