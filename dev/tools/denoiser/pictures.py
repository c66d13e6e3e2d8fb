"""Draw the denoiser's data: 64x64 pictures of ten classes, in which the eye sees what is wrong.

A picture follows from its class and seed alone. Edges are anti-aliased: what is drawn is the
distance to an edge in pixels, negative inside.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIZE = 64
CLASSES = (
    "disc",
    "box",
    "triangle",
    "star",
    "rings",
    "stripes",
    "checker",
    "ball",
    "letter",
    "digit",
)
_LETTERS, _DIGITS = "AEFHKRTX", "2345678"
_FINER = 4  # glyphs are drawn so many times as large
_X, _Y = np.meshgrid(*[np.arange(SIZE, dtype=np.float32) - (SIZE - 1) / 2] * 2)

Array = np.ndarray[Any, Any]
Random = np.random.Generator


def picture(kind: int, seed: int | tuple[int, ...]) -> Array:
    """Return one picture, uint8 [SIZE, SIZE, 3].

    Args:
        kind: a number of `CLASSES`.
        seed: chooses colours, place, size and angle.
    """
    random = np.random.default_rng(seed)
    colours = _colours(random, 4)
    canvas = _gradient(random, colours[0], colours[1])
    name = CLASSES[kind]
    if name == "ball":
        canvas = _with_ball(random, canvas, colours[2], colours[3])
    else:
        canvas = _over(canvas, _DRAWN[name](random), colours[2])
    return (canvas * 255 + 0.5).astype(np.uint8)


def pictures(count: int, *, seed: int = 0, processes: int | None = None) -> tuple[Array, Array]:
    """Return pictures of all classes by turns, uint8 [count, SIZE, SIZE, 3], and their classes.

    Args:
        seed: of the whole set; picture `n` has the seed `(seed, n)`.
        processes: how many draw; None is one for each core, 1 is this one.
    """
    numbers = range(count)
    draw = functools.partial(_numbered, seed)
    if processes == 1:
        drawn = list(map(draw, numbers))
    else:
        with multiprocessing.Pool(processes) as pool:
            drawn = pool.map(draw, numbers, chunksize=64)
    return np.stack(drawn), np.array(numbers) % len(CLASSES)


def _numbered(seed: int, number: int) -> Array:
    return picture(number % len(CLASSES), (seed, number))


# --- colours --------------------------------------------------------------------------------------


def _colours(random: Random, count: int) -> Array:
    """Colours of which each can be told from the others."""
    while True:
        colours = random.random((count, 3), dtype=np.float32)
        distances = np.linalg.norm(colours[:, None] - colours, axis=-1) + 9 * np.eye(count)
        if distances.min() > 0.45:
            return colours


def _gradient(random: Random, first: Array, last: Array) -> Array:
    angle = random.uniform(0, 2 * np.pi)
    share = 0.5 + (_X * np.cos(angle) + _Y * np.sin(angle)) / (1.5 * SIZE)
    return first + (last - first) * np.clip(share, 0, 1)[..., None]


def _over(canvas: Array, cover: Array, colour: Array) -> Array:
    """Paint a colour, or a picture, where `cover` is 1."""
    return canvas + (colour - canvas) * cover[..., None]


def _inside(distance: Array) -> Array:
    return np.clip(0.5 - distance, 0, 1)


# --- shapes: what a colour covers, [SIZE, SIZE] from 0 to 1 ---------------------------------------


def _placed(random: Random) -> tuple[Array, Array]:
    """Coordinates of the pixels around a random centre, turned by a random angle."""
    x, y = _X - random.uniform(-9, 9), _Y - random.uniform(-9, 9)
    angle = random.uniform(0, 2 * np.pi)
    cosine, sine = np.cos(angle), np.sin(angle)
    return cosine * x + sine * y, cosine * y - sine * x


def _disc(random: Random) -> Array:
    return _inside(np.hypot(*_placed(random)) - random.uniform(10, 20))


def _box(random: Random) -> Array:
    x, y = _placed(random)
    half, ratio = random.uniform(9, 17), random.uniform(0.7, 1.4)
    return _inside(np.maximum(abs(x) - half * ratio, abs(y) - half / ratio))


def _triangle(random: Random) -> Array:
    x, y = _placed(random)
    slope = np.sqrt(3) / 2
    sides = [y, slope * x - y / 2, -slope * x - y / 2]
    return _inside(np.maximum.reduce(sides) - random.uniform(8, 13))


def _star(random: Random) -> Array:
    x, y = _placed(random)
    outer = random.uniform(16, 25)
    fifth = 2 * np.pi / 5
    angle = abs((np.arctan2(y, x) + fifth / 2) % fifth - fifth / 2)
    radius = np.hypot(x, y)
    notch = 0.45 * outer * np.array([np.cos(fifth / 2), np.sin(fifth / 2)])
    along = notch - [outer, 0]  # from the tip to the notch beside it
    along /= np.linalg.norm(along)
    return _inside((radius * np.cos(angle) - outer) * along[1] - radius * np.sin(angle) * along[0])


def _bands(position: Array, period: float) -> Array:
    """Distance to the edges of bands as wide as what lies between them."""
    return (abs(position / period % 1 - 0.5) - 0.25) * period


def _rings(random: Random) -> Array:
    radius = np.hypot(*_placed(random))
    bands = _bands(radius, random.uniform(7, 12))
    return _inside(np.maximum(bands, radius - random.uniform(20, 30)))


def _stripes(random: Random) -> Array:
    return _inside(_bands(_placed(random)[0], random.uniform(7, 16)))


def _checker(random: Random) -> Array:
    period = random.uniform(14, 26)
    x, y = (_bands(position, period) for position in _placed(random))
    return _inside(np.sign(x * y) * np.minimum(abs(x), abs(y)))


def _glyph(glyphs: str, random: Random) -> Array:
    glyph = glyphs[random.integers(len(glyphs))]
    mask = Image.new("L", (SIZE * _FINER, SIZE * _FINER))
    x, y = (SIZE / 2 + random.uniform(-7, 7, 2)) * _FINER
    font = _font(int(random.integers(38, 54)) * _FINER)
    ImageDraw.Draw(mask).text((x, y), glyph, fill=255, font=font, addresses="mm")
    turned = mask.rotate(random.uniform(-25, 25), Image.Resampling.BILINEAR, center=(x, y))
    return np.asarray(turned.reduce(_FINER), dtype=np.float32) / 255


@functools.lru_cache(maxsize=32)
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


_DRAWN: dict[str, Callable[[Random], Array]] = {
    "disc": _disc,
    "box": _box,
    "triangle": _triangle,
    "star": _star,
    "rings": _rings,
    "stripes": _stripes,
    "checker": _checker,
    "letter": functools.partial(_glyph, _LETTERS),
    "digit": functools.partial(_glyph, _DIGITS),
}


# --- the ball -------------------------------------------------------------------------------------


def _with_ball(random: Random, canvas: Array, first: Array, second: Array) -> Array:
    """A ball with a pattern of two colours, lit from above, and its shadow on the ground."""
    radius = random.uniform(13, 22)
    x, y = ((p - random.uniform(-8, 8)) / radius for p in (_X, _Y))
    shadow = np.hypot(x / 1.05, (y - 1.0) / 0.35)
    canvas = canvas * (1 - 0.55 * np.clip(1.3 - shadow, 0, 1))[..., None]

    toward = np.sqrt(np.clip(1 - x * x - y * y, 0, 1))
    normal = np.stack([x, y, toward], axis=-1)
    turned = normal @ np.linalg.qr(random.normal(size=(3, 3)))[0]
    around, height = np.arctan2(turned[..., 1], turned[..., 0]), turned[..., 2]
    fields = np.sin(random.integers(2, 5) * around) * np.sin(random.uniform(3, 5) * height)
    surface = first + (second - first) * (0.5 + 0.5 * np.tanh(4 * fields))[..., None]

    light = np.array([random.uniform(-0.6, 0.6), -0.7, 0.7])
    light /= np.linalg.norm(light)
    facing = np.clip(normal @ light, 0, 1)[..., None]
    lit = np.clip(surface * (0.25 + 0.75 * facing) + 0.5 * facing**24, 0, 1)
    return _over(canvas, _inside((np.hypot(x, y) - 1) * radius), lit)
