"""Draw the small pictures that the Templates page shows of each shipped workflow: the model, how
much faster it was measured to be, and what it makes. `python -m dev.tools.thumbnails` makes them.

A model without a figure in `dev/benchmarks/results/headline.json` has its name alone.
"""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path

from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from .templates import TEMPLATES, Template, path

FIGURES = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "headline.json"
#: Of a picture, in pixels; and while it is drawn.
SIDE = 256
_BIG = 800
_MARGIN = 52
_WHITE = (255, 255, 255)

Colour = tuple[int, int, int]

#: Of each family: the sky's upper and lower end, and the land.
COLOURS: dict[str, tuple[Colour, Colour, Colour]] = {
    "SDXL": ((38, 24, 92), (240, 120, 110), (30, 18, 62)),
    "Z-Image": ((6, 58, 92), (90, 205, 200), (5, 40, 58)),
    "Flux.1": ((74, 14, 60), (250, 150, 80), (52, 12, 44)),
    "Flux.2": ((20, 70, 44), (220, 225, 120), (12, 46, 34)),
    "Qwen": ((66, 30, 130), (196, 150, 250), (40, 22, 84)),
    "Wan 2.2": ((10, 34, 96), (110, 170, 255), (8, 24, 62)),
    "LTX-2.3": ((92, 22, 30), (255, 170, 120), (60, 14, 24)),
    "H3": ((30, 34, 44), (150, 170, 190), (18, 22, 30)),
}


def factor(template: Template) -> str:
    """Return how much faster a workflow's model was measured to be, as people write it."""
    if template.figure is None:
        return ""
    value = float(json.loads(FIGURES.read_text("utf-8"))[template.figure]["value"])
    return f"{value:.1f}x" if value >= 2 else f"{value:.2f}x"


def draw(key: str) -> Image.Image:
    """Return the picture of one workflow."""
    template = TEMPLATES[key]
    scene = _scene(template, random.Random(key))
    if template.makes == "edit":
        scene = _half_painted(scene)
    if template.makes == "video":
        _film(scene)
    if template.detail in _MARKS:
        scene = _MARKS[template.detail](scene)
    return _lettered(scene, template).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _scene(template: Template, chance: random.Random) -> Image.Image:
    """A lighthouse above the sea, in the family's colours; its place and the hills by chance."""
    high, low, land = COLOURS[template.model]
    picture = Image.new("RGB", (1, _BIG))
    for y in range(_BIG):
        picture.putpixel((0, y), _between(high, low, (y / _BIG) ** 1.4))
    picture = picture.resize((_BIG, _BIG))
    x, horizon = chance.randint(500, 660), chance.randint(400, 470)
    glow = Image.new("RGB", picture.size)
    sun = (_BIG - x + chance.randint(-60, 60), horizon - chance.randint(0, 70))
    _disc(ImageDraw.Draw(glow), sun, 130, _between(low, _WHITE, 0.35))
    _beam(ImageDraw.Draw(glow), (x, horizon - 150), _between(high, low, 0.55))
    picture = ImageChops.screen(picture, glow.filter(ImageFilter.GaussianBlur(18)))
    pen = ImageDraw.Draw(picture)
    for layer in range(3):
        tint = _between(land, low, 0.42 - 0.2 * layer)
        phase, size = chance.uniform(0, 6), chance.uniform(30, 60)
        top = horizon + 20 + 95 * layer
        edge = [(i, top + size * math.sin(phase + i / (150 + 60 * layer))) for i in range(_BIG + 1)]
        if layer == 1:
            _tower(pen, x, edge[x][1], land, low)
        pen.polygon([*edge, (_BIG, _BIG), (0, _BIG)], fill=tint)
    return picture


def _tower(pen: ImageDraw.ImageDraw, x: int, foot: float, dark: Colour, light: Colour) -> None:
    top = foot - 190
    bright = _between(light, _WHITE, 0.75)
    pen.polygon([(x - 22, top), (x + 22, top), (x + 36, foot + 60), (x - 36, foot + 60)], bright)
    for stripe in (0.3, 0.75):
        y, half = top + 250 * stripe, 22 + 14 * stripe
        pen.polygon(
            [(x - half, y), (x + half, y), (x + half + 2, y + 38), (x - half - 2, y + 38)], dark
        )
    pen.rectangle((x - 18, top - 36, x + 18, top), fill=_between(light, (255, 240, 170), 0.8))
    pen.polygon([(x - 30, top - 36), (x + 30, top - 36), (x, top - 70)], fill=dark)


def _beam(pen: ImageDraw.ImageDraw, lamp: tuple[int, int], colour: Colour) -> None:
    x, y = lamp
    pen.polygon([(x, y), (-40, y - 190), (-40, y + 10)], fill=colour)


def _half_painted(scene: Image.Image) -> Image.Image:
    """The picture before and after: in grey, and right of a slanting line as it was."""
    grey = scene.convert("L").convert("RGB")
    after = Image.new("L", scene.size)
    ImageDraw.Draw(after).polygon([(470, 0), (_BIG, 0), (_BIG, _BIG), (300, _BIG)], fill=255)
    both = Image.composite(scene, grey, after)
    ImageDraw.Draw(both).line([(470, 0), (300, _BIG)], fill=_WHITE, width=8)
    return both


def _film(scene: Image.Image) -> None:
    """Perforate two sides, and put the sign for "play" between them."""
    pen = ImageDraw.Draw(scene, "RGBA")
    for left in (0, _BIG - 40):
        pen.rectangle((left, 0, left + 40, _BIG), fill=(10, 10, 14, 235))
        for y in range(14, _BIG, 56):
            pen.rounded_rectangle((left + 11, y, left + 29, y + 28), 5, fill=(225, 225, 230, 255))
    x, y = _BIG // 2 - 10, 370
    _disc(pen, (x + 10, y), 84, (0, 0, 0, 110))
    pen.polygon([(x - 22, y - 48), (x - 22, y + 48), (x + 58, y)], fill=(255, 255, 255, 235))


def _outlined(scene: Image.Image) -> Image.Image:
    """With the edges that a ControlNet is given."""
    edges = scene.convert("L").filter(ImageFilter.GaussianBlur(2)).filter(ImageFilter.FIND_EDGES)
    lines = edges.point(lambda value: 255 if value > 9 else 0).filter(ImageFilter.MaxFilter(5))
    pale = Image.new("RGB", scene.size, _WHITE)
    return Image.composite(pale, scene.point(lambda value: value * 0.45), lines)


def _tiled(scene: Image.Image) -> Image.Image:
    pen = ImageDraw.Draw(scene)
    for place in range(_BIG // 4, _BIG, _BIG // 4):
        pen.line([(place, 310), (place, _BIG)], fill=_WHITE, width=6)
    for place in range(310, _BIG, 160):
        pen.line([(0, place), (_BIG, place)], fill=_WHITE, width=6)
    return scene


#: What is done to the picture of a workflow with this detail.
_MARKS = {"ControlNet": _outlined, "tiled VAE": _tiled}


def _lettered(scene: Image.Image, template: Template) -> Image.Image:
    """Write the name above, and below the factor, on what is darker there than the picture."""
    measured = factor(template)
    shade = Image.new("L", (1, _BIG))
    for y in range(_BIG):
        above, below = max(0.0, 1 - y / 330), max(0.0, (y - 420) / 380) if measured else 0.0
        shade.putpixel((0, y), int(190 * max(above, below)))
    dark = Image.new("RGB", scene.size, (8, 8, 16))
    scene = Image.composite(dark, scene, shade.resize(scene.size))
    left = _MARGIN + (24 if template.makes == "video" else 0)
    pen = ImageDraw.Draw(scene)
    _write(pen, (left, 40), template.model, 138, bold=4, room=_BIG - 2 * left)
    _write(pen, (left, 196), template.detail, 76, bold=1, room=_BIG - 2 * left)
    if measured:
        _write(pen, (left, 590), measured, 184, bold=6, room=_BIG - 2 * left)
        end = int(left + pen.textlength(measured, _font(184))) + 24
        _write(pen, (end, 690), "faster", 66, bold=1, room=_BIG - end - left)
    return scene


def _write(
    pen: ImageDraw.ImageDraw, place: tuple[int, int], text: str, size: int, *, bold: int, room: int
) -> None:
    """Write a line, smaller where there is not enough room."""
    font = _font(size)
    while pen.textlength(text, font) > room:
        size -= 4
        font = _font(size)
    pen.text(place, text, _WHITE, font, stroke_width=bold, stroke_fill=_WHITE)


def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow must have FreeType, got one without")
    return font


def _disc(pen: ImageDraw.ImageDraw, middle: tuple[float, float], radius: int, fill: object) -> None:
    x, y = middle
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)


def _between(one: Colour, two: Colour, share: float) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, two, strict=True))
    return red, green, blue


def encoded(key: str) -> bytes:
    """Return the picture as a small JPEG."""
    data = io.BytesIO()
    draw(key).save(data, "JPEG", quality=76, optimize=True)
    return data.getvalue()


if __name__ == "__main__":
    for name in TEMPLATES:
        path(name).with_suffix(".jpg").write_bytes(encoded(name))
