"""How similar images are: PSNR, and SSIM (Wang et al. 2004)."""

from __future__ import annotations

import torch

_WINDOW, _DEVIATION = 11, 1.5  # SSIM's constants, as its authors chose them


def psnr(images: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio in dB of each image; infinite where they are equal.

    Args:
        images: [B, ...], 0 to 1.
        references: the same.

    Returns:
        [B], float64.
    """
    error = (images.double() - references.double()).square().flatten(1).mean(dim=1)
    return -10 * error.log10()


def ssim(images: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity of each image, mean over its channels, and frames.

    Windows of 11x11 that lie within the image, weighted by a Gaussian; where a side is less than
    that, as long as the side.

    Args:
        images: [B, ..., H, W], 0 to 1.
        references: the same.

    Returns:
        [B], float64.
    """
    planes = (image.double().reshape(-1, 1, *image.shape[-2:]) for image in (images, references))
    x, y = planes
    mean_x, mean_y = _smoothed(x), _smoothed(y)
    variance_x, variance_y = _smoothed(x * x) - mean_x**2, _smoothed(y * y) - mean_y**2
    covariance = _smoothed(x * y) - mean_x * mean_y
    small, larger = 0.01**2, 0.03**2
    similarity = (2 * mean_x * mean_y + small) * (2 * covariance + larger)
    similarity /= (mean_x**2 + mean_y**2 + small) * (variance_x + variance_y + larger)
    return similarity.view(len(images), -1).mean(dim=1)


def _smoothed(planes: torch.Tensor) -> torch.Tensor:
    """Weighted means over the windows of planes [N, 1, H, W]."""
    rows, columns = (_weights(size).to(planes) for size in planes.shape[-2:])
    along = torch.nn.functional.conv2d(planes, columns.view(1, 1, 1, -1))
    return torch.nn.functional.conv2d(along, rows.view(1, 1, -1, 1))


def _weights(size: int) -> torch.Tensor:
    """Those of a window along a side of so many pixels."""
    window = min(_WINDOW, size)
    place = torch.arange(window, dtype=torch.float64) - (window - 1) / 2
    weight = torch.exp(-0.5 * (place / _DEVIATION) ** 2)
    return weight / weight.sum()
