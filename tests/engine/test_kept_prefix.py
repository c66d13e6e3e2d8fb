"""A transformer that computes text and reference images once in a run and keeps their keys and
values: Qwen-Image 2.1, where the host has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab
from .transformer_runs import Run

KIND = "qwen21"


@pytest.fixture(scope="module")
def run(host: Host, shared: Lab) -> Run:
    pytest.importorskip("comfy.ldm.qwen_image21.model")
    run = Run(host, shared, KIND)
    run.sample()
    return run


def _forgetting(model: Any) -> Any:
    """A clone whose calls find nothing kept by the one before."""
    from comfy.patcher_extension import WrappersMP

    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        executor.class_obj.reset_prefix_cache(True)
        return executor(*args, **kwargs)

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test.forgetting", around)
    return clone


def _keeping_nothing(model: Any) -> Any:
    clone = model.clone()
    clone.model_options["transformer_options"]["qwen_image21_cache"] = {"device": "off"}
    return clone


def _references(*sizes: tuple[int, int]) -> dict[str, Any]:
    return {"reference_latents": [transformers.reference(KIND, *size) for size in sizes]}


@pytest.mark.parametrize(
    ("size", "tokens", "sizes"),
    [
        ((8, 8, 1), 13, ()),
        ((6, 10, 2), 24, ()),
        ((8, 8, 1), 13, ((8, 8),)),
        ((10, 6, 1), 5, ((6, 8), (4, 4))),
    ],
)
def test_every_size_text_and_reference_is_compiled_and_the_hosts(
    run: Run, size: tuple[int, int, int], tokens: int, sizes: tuple[tuple[int, int], ...]
) -> None:
    run.check(*size, tokens, **_references(*sizes))


@pytest.mark.parametrize("changed", [_forgetting, _keeping_nothing])
@pytest.mark.parametrize("sizes", [(), ((8, 8), (4, 6))])
def test_what_comes_before_the_image_is_compiled_too(
    run: Run, changed: Any, sizes: tuple[tuple[int, int], ...]
) -> None:
    """Alone, in the first step of a run, or with the image in each, where nothing is kept."""
    model, before = changed(run.model), run.lab.engine.report(run.model)["calls"]
    run.sample(8, 6, 1, 11, model=model, **_references(*sizes))
    calls = run.lab.engine.report(model)["calls"]
    times = 2 if changed is _forgetting else 1
    assert calls["eager"] == before["eager"] and run.probe.calls
    blocks = times * run.expected.places
    assert calls["compiled"] - before["compiled"] == len(run.probe.calls) * blocks
    assert max(call.error for call in run.probe.calls) <= TOLERANCE


def test_patches_within_attention_are_the_hosts(run: Run) -> None:
    def patch(q: Any, k: Any, v: Any, **_: Any) -> dict[str, Any]:
        return {"q": q * 1.5}

    model = run.model.clone()
    model.set_model_patch(patch, "attn1_patch")
    run.sample(model=model)
    eager = run.lab.engine.report(model)["eager"]
    assert {each["reason"] for each in eager} == {"another node patches attn1_patch"}
    assert max(call.error for call in run.probe.calls) <= TOLERANCE
    run.check()


@pytest.fixture
def seen(run: Run) -> Iterator[list[tuple[int, ...]]]:
    """Sizes of the queries that another node's attention is given."""
    found: list[tuple[int, ...]] = []
    yield found


def test_another_nodes_attention_is_called(run: Run, seen: list[tuple[int, ...]]) -> None:
    def attend(function: Any, q: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(tuple(q.shape))
        return function(q, *args, **kwargs) * 0.5

    model = run.model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = attend
    run.check(model=model)
    assert len(seen) >= len(run.probe.calls) * run.expected.attentions
    assert "optimized_attention_override" in model.model_options["transformer_options"]
