"""How far images are from others, and sheets of them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

_WINDOW, _DEVIATION = 11, 1.5  # of SSIM, as its authors chose them
_LABEL = 16  # pixels


def psnr(images: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio in dB of each image; infinite where they are equal.

    Args:
        images: [B, H, W, C], 0 to 1.
        references: the same.

    Returns:
        [B], float64.
    """
    error = (images.double() - references.double()).square().mean(dim=(1, 2, 3))
    return -10 * error.log10()


def ssim(images: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity (Wang et al. 2004) of each image, mean over its channels.

    Windows of 11x11 pixels that lie within the image, weighted by a Gaussian.

    Args:
        images: [B, H, W, C], 0 to 1.
        references: the same.

    Returns:
        [B], float64.
    """
    batch = len(images)
    x, y = (image.double().movedim(-1, 1).flatten(0, 1)[:, None] for image in (images, references))
    mean_x, mean_y = _smoothed(x), _smoothed(y)
    variance_x, variance_y = _smoothed(x * x) - mean_x**2, _smoothed(y * y) - mean_y**2
    covariance = _smoothed(x * y) - mean_x * mean_y
    small, larger = 0.01**2, 0.03**2
    similarity = (2 * mean_x * mean_y + small) * (2 * covariance + larger)
    similarity /= (mean_x**2 + mean_y**2 + small) * (variance_x + variance_y + larger)
    return similarity.view(batch, -1).mean(dim=1)


def _smoothed(planes: torch.Tensor) -> torch.Tensor:
    """Weighted means over the windows of planes [N, 1, H, W]."""
    place = torch.arange(_WINDOW, dtype=planes.dtype, device=planes.device) - _WINDOW // 2
    weight = torch.exp(-0.5 * (place / _DEVIATION) ** 2)
    weight = weight / weight.sum()
    rows = torch.nn.functional.conv2d(planes, weight.view(1, 1, 1, -1))
    return torch.nn.functional.conv2d(rows, weight.view(1, 1, -1, 1))


def contact_sheet(
    columns: Mapping[str, torch.Tensor],
    rows: Sequence[str],
    file: Path,
    *,
    scale: int = 2,
    most_bytes: int = 400_000,
) -> None:
    """Write a PNG of images side by side, with as many levels of each colour as its size allows.

    Args:
        columns: label of a column and its images, [rows, H, W, 3], 0 to 1; a label may have lines.
        rows: label of each row.
        scale: each pixel becomes `scale` x `scale`.
        most_bytes: noise takes many; there are never fewer than 16 levels.
    """
    font = ImageFont.load_default(11)
    height, width = (scale * size for size in next(iter(columns.values())).shape[1:3])
    left, top = 4 * _LABEL, _LABEL * max(label.count("\n") + 1 for label in columns)
    sheet = Image.new("RGB", (left + width * len(columns), top + height * len(rows)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        middle = top + height * number + height // 2
        draw.text((4, middle), row, fill="black", font=font, addresses="lm")
    for number, (label, images) in enumerate(columns.items()):
        x = left + width * number
        draw.multiline_text((x + 4, 2), label, fill="black", font=font, spacing=2)
        for row, image in enumerate(images):
            pixels = Image.fromarray((image * 255).round().byte().cpu().numpy())
            larger = pixels.resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(larger, (x, top + height * row))
    file.parent.mkdir(parents=True, exist_ok=True)
    for bits in (8, 7, 6, 5, 4):
        step = 255 / (2**bits - 1)
        levels = [round(round(value / step) * step) for value in range(256)]
        sheet.point(levels * 3).save(file, optimize=True)
        if file.stat().st_size <= most_bytes:
            break
