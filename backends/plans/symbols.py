"""Sizes of transformers' blocks, with the values that they are tuned for."""

from __future__ import annotations

from ..contract import Symbol

#: Tokens of an image or a video, of a text, and of both together.
SYMBOLS = {
    s.name: s
    for s in (
        Symbol("batch", 1, 64, 2),
        Symbol("img", 1, 2**17, 4104),
        Symbol("txt", 1, 2**14, 264),
        Symbol("tokens", 1, 2**17, 4368),
    )
}
