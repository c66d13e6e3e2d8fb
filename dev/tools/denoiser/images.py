"""How far images are from others, and sheets of them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from ..by_path import ROOT, load

_LABEL = 16  # pixels
#: What users have of it, by its path: the pack's packages have other names here and there.
_likeness = load("warmgraph_likeness", ROOT / "backends" / "sessions" / "likeness.py")
psnr = _likeness.psnr


def ssim(images: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity of each image, mean over its channels.

    Args:
        images: [B, H, W, C], 0 to 1.
        references: the same.

    Returns:
        [B], float64.
    """
    alike: torch.Tensor = _likeness.ssim(images.movedim(-1, 1), references.movedim(-1, 1))
    return alike


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
