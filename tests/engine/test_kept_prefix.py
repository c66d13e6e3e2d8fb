"""A transformer that computes text and reference images once in a run and keeps their keys and
values: Qwen-Image 2.1, where the host has it, and a made-up one of the same sort.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.contract import InputSpec, Symbol
from warmgraph_backends.families import catalogue as registry
from warmgraph_backends.families import dit
from warmgraph_backends.plans.binding import TAKEN
from warmgraph_backends.plans.family import Family
from warmgraph_backends.plans.plan import Plan, RegionCall, host_forward
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .made_up import compiled, new_lab, register
from .transformer_runs import Run, keeping_nothing

KIND = "qwen21"


@pytest.fixture(scope="module")
def run(host: Host, shared: Lab) -> Run:
    if not transformers.is_there(KIND):
        pytest.skip("this ComfyUI has no Qwen-Image 2.1")
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


@pytest.mark.parametrize("changed", [_forgetting, keeping_nothing])
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
    assert len(seen) >= len(run.probe.calls) * run.expected.places
    assert "optimized_attention_override" in model.model_options["transformer_options"]


class Attends(torch.nn.Module):
    """A block that attends by what it is called with: `x [batch, tokens, C]` -> the same, written
    into.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, attend: Any) -> torch.Tensor:
        parts = (layer(x).view(*x.shape[:2], 2, 8) for layer in (self.to_q, self.to_k, self.to_v))
        x += attend(*parts, 2)
        return x


class Prefixed(torch.nn.Module):
    """The made-up model of two of them, which keeps what it computes of a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Attends(), Attends()])
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, prefix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        prefix, x = prefix.clone(), x.clone()
        is_new = not self.kept
        for i, block in enumerate(self.blocks):
            if is_new:
                prefix = block(prefix, partial(self._filling, i))
            x = block(x, partial(_attend, before=self.kept[i]))
        return x

    def _filling(self, i: int, q: Any, k: Any, v: Any, heads: int, **named: Any) -> torch.Tensor:
        self.kept[i] = k, v
        return _attend(q, k, v, heads, **named)


def _attend(
    q: Any, k: Any, v: Any, heads: int, *, before: Any = None, preferred_attention: Any = None
) -> torch.Tensor:
    from comfy.ldm.modules.attention import optimized_attention

    if before is not None:
        k, v = (torch.cat(pair, 1) for pair in zip(before, (k, v), strict=True))
    result: torch.Tensor = optimized_attention(*(t.flatten(2) for t in (q, k, v)), heads)
    return result


class AttendsForm(dit.Attending):
    family = "prefixed"
    name = "block"
    writes = (0,)
    arguments = dit.takes(x=TAKEN, attend=TAKEN)

    def serve(self, call: RegionCall, options: dit.Options, *inputs: Any) -> Any:
        x, attend = inputs
        return dit.serve(call, None, options, x, live={"attend": attend})

    def label(self, module: Any) -> str:
        return "Prefixed"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("batch", "tokens", 16)),)

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return host_forward(module, *inputs, dit.attention("attend"))


def _plan_prefixed(model: Any) -> Plan:
    sizes = (Symbol("batch", 1, 8, 2), Symbol("tokens", 1, 512, 40))
    plan = Plan(symbols={symbol.name: symbol for symbol in sizes})
    dit.cut_stack(plan, model, "blocks", Attends, AttendsForm())
    return plan


def test_a_made_up_model_that_keeps_a_prefix_runs_compiled(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = {f"{__name__}:Prefixed": _plan_prefixed}
    family = Family(title="Prefixed", roots=roots, forms={"block": AttendsForm()})
    register(monkeypatch, family)
    model = Prefixed().requires_grad_(False)
    plan = registry.plan_model(model)
    assert isinstance(plan, Plan)
    with compiled(new_lab(tmp_path), model, plan) as (scope, kinds), torch.inference_mode():
        assert len(kinds) == 1
        for batch, before, tokens in ((1, 5, 40), (2, 3, 9), (1, 200, 1)):
            prefix, x = torch.randn(batch, before, 16), torch.randn(batch, tokens, 16)
            for is_first in (True, False):  # a run's first step, and another
                if is_first:
                    model.kept.clear()
                calls = scope.compiled_calls
                result = scope.call(model, (prefix, x), {}).result
                assert scope.compiled_calls == calls + (4 if is_first else 2)
                kept = [tensor.clone() for pair in model.kept.values() for tensor in pair]
                model.kept.clear()
                assert relative(result, model(prefix, x)) < TOLERANCE
                theirs = [tensor for pair in model.kept.values() for tensor in pair]
                assert all(relative(a, b) < TOLERANCE for a, b in zip(kept, theirs, strict=True))
        assert scope.eager_places() == []
