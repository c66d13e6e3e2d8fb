"""Wan Animate 2, whose blocks the host calls by methods of their own, where a host has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative, sampled
from .quantised_runs import QUANTISED
from .transformer_runs import Run

KIND = "wan_animate2"
BLOCKS = 2
#: Of a block in a call: queries of both videos and what is behind their attentions; of kept tokens
#: the keys, and queries of the one that is made.
FRESH, KEPT, ALONE = 4, 3, 2

METHODS = {"forward_pose", "forward_gen", "kv_from_input"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(host: Host, shared: Lab) -> Iterator[Run]:
    if not transformers.is_here(KIND):
        pytest.skip("this host has no Wan Animate 2")
    run = Run(host, shared, KIND)
    _sample(run)
    yield run


def _sample(
    run: Run,
    height: int = 8,
    width: int = 8,
    batch: int = 1,
    *,
    frames: int = 3,
    pose: bool = True,
    **options: Any,
) -> torch.Tensor:
    facts = transformers.extras(KIND, height, width, frames) if pose else {}
    return run.sample(height, width, batch, frames=frames, cfg=1.0, **{**facts, **options})


def _check(run: Run, regions: int, *size: int, **options: Any) -> None:
    """Every call was all compiled and the host's within tolerance, at no build."""
    engine, jobs = run.lab.engine, run.lab.jobs()
    model = options.get("model", run.model)
    before = engine.report(model)["calls"]
    _sample(run, *size, **options)
    report = engine.report(model)
    assert run.lab.jobs() == jobs
    assert report["regions"]["eager"] == 0, report["eager"]
    assert report["calls"]["eager"] == before["eager"]
    compiled = report["calls"]["compiled"] - before["compiled"]
    assert compiled == len(run.probe.calls) * (BLOCKS * regions + 1) > 0  # and a head
    assert max(call.error for call in run.probe.calls) <= TOLERANCE
    for part in run.plain.model.diffusion_model.modules():
        assert not METHODS & part.__dict__.keys()  # nothing of ours is left behind


def test_its_blocks_are_three_kinds_and_a_head(run: Run) -> None:
    report = run.lab.engine.report(run.model)
    assert [kind["state"] for kind in report["kinds"]] == ["ready"] * 4
    assert report["regions"]["eager"] == 0, report["eager"]
    assert report["builds"] + report["loads"] + report["reused"] == 4
    kinds = run.model.get_attachment("warmgraph").scope.kinds
    sources = {name for kind in kinds for name in kind.graph.description.sources}
    host = "comfy.ldm.wan.model_animate2"
    for code in ("Block._modulation", "Block._cross_attn_ffn", "SelfAttention.qkv"):
        assert f"{host}:WanAnimate2{code}" in sources  # what is traced is in the keys


@pytest.mark.parametrize("size", [(8, 8, 1), (12, 10, 2), (16, 24, 1)])
def test_any_size_and_length_runs_compiled_and_builds_nothing(
    run: Run, size: tuple[int, int, int]
) -> None:
    for frames in (2, 5):
        _check(run, FRESH, *size, frames=frames)


def test_strengths_and_steps_without_the_driving_video_are_the_hosts(run: Run) -> None:
    _check(run, FRESH, 8, 10, pose_strength=0.6, reference_strength=0.8)
    _check(run, ALONE, 8, 10, pose=False)


def test_tokens_of_the_driving_video_are_kept_from_step_to_step(run: Run) -> None:
    """As the node WanAnimate2Cache has it: ours fills it, and eager and ours read it."""
    from comfy.ldm.wan.model_animate2 import PoseBranchCache

    plain = _sample(run, model=run.plain)
    keeping = run.model.clone()
    options = keeping.model_options["transformer_options"]
    cache = options["animate2_cache"] = PoseBranchCache()
    run.probe.is_off = True
    try:
        filled = _sample(run, model=keeping)
    finally:
        run.probe.is_off = False
    assert cache.filled(BLOCKS)
    assert relative(filled, plain) <= TOLERANCE
    _check(run, KEPT, model=keeping)
    cache.free()


def test_a_patch_within_the_blocks_is_named_and_all_is_compiled_again_afterwards(run: Run) -> None:
    patched = run.model.clone()
    patched.set_model_attn2_patch(lambda given: given["x"] * 1.5)
    engine = run.lab.engine
    changed = _sample(run, model=patched)
    report = engine.report(patched)
    assert {entry["reason"] for entry in report["eager"]} == {"another node patches attn2_patch"}
    assert max(call.error for call in run.probe.calls) <= TOLERANCE
    _check(run, FRESH)
    assert not torch.equal(changed, _sample(run))


@pytest.mark.parametrize("path", ["kv_from_input", "forward_gen", "self_attn.forward_gen"])
def test_another_nodes_method_in_a_block_is_called_and_named(run: Run, path: str) -> None:
    block = run.plain.model.diffusion_model.blocks[1]
    owner, _, name = path.rpartition(".")
    part = block.get_submodule(owner)
    calls = []

    def another(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return getattr(type(part), name)(part, *args, **kwargs)

    part.__dict__[name] = another
    try:
        _sample(run)
        report = run.lab.engine.report(run.model)
    finally:
        del part.__dict__[name]
    reason = f"another node replaces the forward of a {type(part).__name__}"
    assert {entry["reason"] for entry in report["eager"]} == {reason}
    assert max(call.error for call in run.probe.calls) <= TOLERANCE
    if name == "forward_gen":  # by eager and by ours
        assert len(calls) == 2 * len(run.probe.calls)
    _check(run, FRESH)


def test_its_int8_file_runs_compiled_at_any_size(host: Host, shared: Lab, run: Run) -> None:
    plain = transformers.load_quantised(KIND, "int8_convrot")
    ours = shared.compiled(plain)
    for first, (height, width, frames) in ((True, (8, 8, 3)), (False, (12, 10, 4))):
        jobs = shared.jobs()
        facts = transformers.extras(KIND, height, width, frames)
        prompt = transformers.conditioning(KIND, 13, **facts)
        latent = transformers.latent(KIND, height, width, frames=frames)
        made, eager = sampled(host, [ours, plain], prompt, latent)
        assert relative(made, eager) <= QUANTISED
        report = shared.engine.report(ours)
        assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
        assert report["calls"]["compiled"] > 0
        assert first or shared.jobs() == jobs
