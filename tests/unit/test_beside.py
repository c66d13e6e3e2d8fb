"""A prompt and its plain form in one."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from .test_placing import LOADER, node


@pytest.fixture(scope="module")
def both(pack: ModuleType) -> Any:
    nodes = f"{pack.__name__}.nodes"
    plain = sys.modules[f"{nodes}.plain"].plain_prompt
    put_beside = sys.modules[f"{nodes}.beside"].put_beside
    return lambda prompt, outputs: put_beside(prompt, plain(prompt)[0], outputs)


def test_what_makes_the_plain_image_stands_beside_our_nodes(both: Any) -> None:
    prompt = {
        "1": LOADER,
        "2": node("WarmgraphCompileModel", model="1.0", backend="auto"),
        "3": node("WarmgraphDeepCache", model="2.0"),
        "4": node("KSampler", model="3.0", seed=7),
        "5": node("SaveImage", images="4.0"),
        "6": node("WarmgraphGraphReport", model="3.0"),
        "7": node("PreviewImage", images="4.0"),
    }
    before = repr(prompt)
    made, outputs = both(prompt, ["5", "6", "7"])
    assert repr(prompt) == before
    assert outputs == ["5-plain", "7-plain"], "previews of the page stay as they are"
    assert made["4"] == node("KSampler", model="2-plain.0", seed=7)
    assert made["2-plain"] == node("WarmgraphCompileModel", model="1.0", backend="eager")
    assert made["5-plain"] == node("PreviewImage", images="4.0")
    for kept in "12357":  # the host keeps their results, and runs none of them for these outputs
        assert made[kept] == prompt[kept]


def test_of_a_prompt_without_our_nodes_only_what_is_shown_has_another_id(both: Any) -> None:
    prompt = {"1": LOADER, "4": node("KSampler", model="1.0"), "7": node("PreviewImage")}
    assert both(prompt, ["7"]) == ({**prompt, "7-plain": prompt["7"]}, ["7-plain"])


def test_outputs_that_are_none_are_passed_over(both: Any) -> None:
    assert both({"1": LOADER}, ["9", 1, None, ["1"]]) == ({"1": LOADER}, [])
