"""A prompt with our nodes out of the way."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from .test_placing import LOADER, node


@pytest.fixture(scope="module")
def plain(pack: ModuleType) -> Any:
    return sys.modules[f"{pack.__name__}.nodes.plain"].plain_prompt


def test_compile_nodes_time_what_comfyui_does(plain: Any) -> None:
    prompt = {
        "1": LOADER,
        "2": node("WarmgraphCompileModel", model="1.0", when_missing="wait", form="exact"),
        "3": node("KSampler", model="2.0"),
        "4": node("WarmgraphCompileVAE", vae="1.2", when_missing="background", parts="decoder"),
        "5": node("WarmgraphCompileControlNet", control_net="8.0", backend="inductor"),
        "6": node("WarmgraphGraphReport", model="2.0"),
    }
    before = repr(prompt)
    made, changed = plain(prompt)
    assert changed == 3 and repr(prompt) == before
    for number in "245":
        wanted = {**prompt[number]["inputs"], "backend": "eager"}
        assert made[number] == {"class_type": prompt[number]["class_type"], "inputs": wanted}
    assert [made[number] for number in "136"] == [prompt[number] for number in "136"]


def test_what_loads_files_or_skips_steps_is_linked_past(plain: Any) -> None:
    prompt = {
        "1": LOADER,
        "2": node("WarmgraphLoadCompiledGraph", model="1.0", folder="x", strict=True),
        "3": node("WarmgraphDeepCache", model="2.0", interval=3),
        "4": node("WarmgraphCompileModel", model="3.0", when_missing="wait"),
        "5": node("KSampler", model="4.0"),
        "6": node("WarmgraphLoadCompiledGraphVAE", vae="1.2", folder="x", strict=False),
        "7": node("VAEDecode", samples="5.0", vae="6.0"),
        "8": node("KSampler", model="3.0", seed=5),
    }
    made, changed = plain(prompt)
    assert changed == 4 and set(made) == {"1", "4", "5", "7", "8"}
    assert made["4"]["inputs"]["model"] == ["1", 0]
    assert made["7"]["inputs"] == {"samples": ["5", 0], "vae": ["1", 2]}
    assert made["8"]["inputs"] == {"model": ["1", 0], "seed": 5}


def test_images_are_shown_and_not_saved(plain: Any) -> None:
    prompt = {
        "1": node("SaveImage", images="2.0", filename_prefix="x"),
        "2": node("VAEDecode"),
        "3": node("SaveAnimatedWEBP", images="2.0", fps=6.0),
        "4": node("PreviewImage", images="2.0"),
    }
    made, changed = plain(prompt)
    assert changed == 2
    shown = {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}}
    assert made["1"] == made["3"] == made["4"] == shown


def test_what_leads_nowhere_is_left_for_the_host_to_refuse(plain: Any) -> None:
    prompt = {
        "1": node("WarmgraphDeepCache", model="2.0"),
        "2": node("WarmgraphDeepCache", model="1.0"),
        "3": node("KSampler", model="2.0", seed=1),
        "4": node("WarmgraphDeepCache", interval=3),
        "5": node("KSampler", model="4.0"),
        "6": {"class_type": "WarmgraphDeepCache", "inputs": None},
        "7": node("KSampler", model="6.0"),
        "8": None,
        "9": {"inputs": {"model": ["4", 0]}},
    }
    made, _ = plain(prompt)
    assert made["3"]["inputs"] == {"seed": 1}
    assert made["5"]["inputs"] == {} and made["8"] is None
    assert made["9"] == prompt["9"]
