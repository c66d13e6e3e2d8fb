"""Compares two LATENTs, in words."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from .likeness import psnr, ssim
from .lines import Line, in_english, line, plain

logger = logging.getLogger(__name__)


def latents_part(latent: Any, compared_with: Any) -> dict[str, Any]:
    """Return how similar two LATENTs are, as a part of a report, without an id because it does not
    change. Says what cannot be compared; never raises.

    Latents have no fixed range. So each image (or video) of the batch is measured by the range of
    its reference: that one's lowest value counts as 0, its highest as 1, which is PSNR's peak.

    Args:
        latent: the host's dict of `samples`, [B, C, ..., H, W] or nested ones, of any dtype and on
            any device; None if nothing is linked.
        compared_with: the reference, likewise.
    """
    try:
        lines = list(_lines(latent, compared_with))
    except Exception as error:  # nothing may fail a prompt that eager would have finished
        logger.exception("Latents could not be compared")
        lines = [line("latents_failed", error=error)]
    return {"id": "", "text": in_english(lines), "whole": plain(lines)}


def _lines(latent: Any, compared_with: Any) -> Iterator[Line]:
    if latent is None or compared_with is None:
        yield line("latents_missing")
        return
    found, wanted = _tensors(latent), _tensors(compared_with)
    shapes, others = ([tuple(each.shape) for each in side] for side in (found, wanted))
    if shapes != others:
        told, other = (", ".join(map(_shape, side)) for side in (shapes, others))
        yield line("latents_shapes", shape=told, other=other)
        return
    for number, (x, y) in enumerate(zip(found, wanted, strict=True), 1):
        if len(found) > 1:
            yield line("latents_part", part=number, parts=len(found))
        yield _compared(x, y)


def _tensors(latent: Any) -> list[torch.Tensor]:
    """A LATENT's samples, on the processor: of video with sound there are several."""
    samples = latent["samples"]
    return [each.cpu().double() for each in (samples.unbind() if samples.is_nested else [samples])]


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _compared(x: torch.Tensor, y: torch.Tensor) -> Line:
    """How similar `y` and `x` are, both [B, C, ...]."""
    if torch.equal(x, y):
        return line("latents_same")
    low, high = (edge.view(-1, *[1] * (y.dim() - 1)) for edge in y.flatten(1).aminmax(dim=1))
    x, y = ((each - low) / (high - low) for each in (x, y))
    noise = psnr(x, y)
    alike = ssim(*(each.reshape(len(y), -1, *(1, *y.shape[2:])[-2:]) for each in (x, y)))
    if not alike.isfinite().all():
        return line("latents_range")
    # Decibels of the mean error: one image that is equal would make their mean infinite.
    mean = -10 * (10 ** (-noise / 10)).mean().log10()
    if len(y) == 1:
        return line("latents_like", psnr=f"{mean:.1f}", ssim=f"{alike.mean():.4f}")
    return line(
        "latents_like_several",
        count=len(y),
        psnr=f"{mean:.1f}",
        ssim=f"{alike.mean():.4f}",
        least_psnr=f"{noise.min():.1f}",
        least_ssim=f"{alike.min():.4f}",
    )
