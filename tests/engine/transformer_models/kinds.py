"""The kinds of small transformers that these tests run over."""

from __future__ import annotations

import pytest

from ..transformer_runs import EXPECTED

# What others take, too, or next to it: their builds are for `--all`.
SLOW = (
    *("flux1", "chroma", "lumina2", "sd3", "hunyuan", "hunyuan_15"),
    *("qwen", "krea", "wan_image", "wan_5b", "anima", "predict2_video"),
)
# By whose blocks they have.
VARIANTS = {
    "wan_5b": ("wan", "wan_vace", "wan_camera", "wan_s2v", "wan_humo"),
    "wan_image": ("wan_animate", "wan_scail", "wan_scail2", "wan_dancer"),
    "hunyuan": ("hunyuan_flow",),
    "flux1": ("hunyuan_image", "flux_fill"),
    "qwen": ("qwen_layered",),
    "anima": ("predict2",),
}
# Which not every host has: tested in a file of its own.
ELSEWHERE = ("wan_animate2",)
FAMILIES = [
    pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else [])
    for kind in EXPECTED
    if kind not in sum(VARIANTS.values(), ELSEWHERE)
]
