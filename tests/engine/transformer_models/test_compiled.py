"""Diffusion transformers run compiled: the host's own blocks, any size, batch and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.families import dit
from warmgraph_backends.host_api import kitchen
from warmgraph_backends.runtime import input_guard
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from ..blocks import check_blocks
from ..elsewhere import block_classes, check_one_more_argument
from ..lab import TOLERANCE, Lab
from ..recorded_graphs import cuts
from ..transformer_runs import Run, keeping_nothing
from .kinds import VARIANTS

SIZES = ((8, 8, 1, 13), (17, 31, 1, 300), (12, 10, 2, 1), (16, 16, 4, 77))
# Which have blocks of a sort of their own besides.
OWN_BLOCKS = ("wan_vace", "wan_humo")
# Whose blocks add to what they are given.
_FLUX = {"DoubleStreamBlock", "SingleStreamBlock"}
WRITING = dict.fromkeys(("flux1", "flux2", "chroma", "hunyuan", "hunyuan_15"), _FLUX)
WRITING["qwen21"] = {"QwenImage21TransformerBlock"}
# Whose texts are padded to one length, so that guidance makes one call of two prompts.
GUIDED = ("wan", "wan_image", "wan_5b", "sd3", "anima", "predict2_video")
BY_THE_CALL = "a function of the call attends between what is replayed"
# Which take reference images, and what the host has to be told for it.
REFERRING: dict[str, dict[str, Any]] = {
    "flux1": {},
    "flux2": {},
    "qwen": {},
    "qwen21": {},
    "krea": {"reference_latents_method": "index"},
}


def test_all_blocks_have_regions_of_few_kinds(run: Run) -> None:
    report = run.lab.engine.report(run.model)
    kinds, others = run.expected.kinds, run.expected.others
    places = run.expected.places - others  # which the last run did not call
    assert report["regions"] == {"total": places, "compiled": places, "eager": 0}
    assert report["idle"] == others
    assert [kind["state"] for kind in report["kinds"]] == ["ready"] * kinds
    # What others have, too (HunyuanVideo Flux's, tests before these), was there before.
    assert report["builds"] + report["loads"] + report["reused"] == kinds


@pytest.mark.parametrize("size", SIZES)
def test_any_size_batch_and_text_runs_compiled_and_builds_nothing(
    run: Run, size: tuple[int, int, int, int]
) -> None:
    run.check(*size, frames=1 + size[3] % 3)


def test_blocks_leave_in_their_inputs_and_give_back_what_the_hosts_do(run: Run) -> None:
    """Whoever keeps what he gave a block finds there what it computed, if the host's adds to it."""
    scope = run.model.get_attachment("warmgraph").scope
    plain = keeping_nothing(run.plain) if run.kind == "qwen21" else run.plain
    writing = check_blocks(scope, lambda: run.sample(model=plain))
    assert writing == WRITING.get(run.kind, set())
    declared = {type(p.module).__name__ for p in scope.plan.places if p.form.writes}
    assert declared == writing


def test_a_newer_hosts_argument_leaves_its_blocks_to_it_and_ends_no_prompt(run: Run) -> None:
    run.sample()
    jobs = run.lab.jobs()

    def check(model: Any) -> None:
        run.sample(model=model)
        assert max(call.error for call in run.probe.calls) <= TOLERANCE

    check_one_more_argument(
        block_classes(run.model.get_attachment("warmgraph")),
        lambda: run.lab.compiled(run.plain),
        check,
        run.lab.engine.report,
    )
    assert run.lab.jobs() == jobs
    run.check()


def test_a_place_is_replayed_in_one_piece_and_an_attention_that_may_change_cuts_it(
    run: Run,
) -> None:
    called: list[int] = []

    def attend(function: Any, *args: Any, **named: Any) -> torch.Tensor:
        called.append(1)
        result: torch.Tensor = function(*args, **named)
        return result

    keeps_keys = run.kind == "qwen21"  # whose first pass attends by a function of its own
    found = cuts(run.sample)
    assert set(found) == ({BY_THE_CALL} if keeps_keys else set())
    clone = run.model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    options["optimized_attention_override"] = attend
    found = cuts(lambda: run.sample(model=clone))
    assert max(call.error for call in run.probe.calls) <= TOLERANCE
    others = [why for why in found if "(reads called, which may change)" in why]
    assert len(others) == 1 and len(found) == 1 + keeps_keys
    if not keeps_keys:
        assert found[others[0]] == run.expected.attentions * len(run.probe.calls) > 0


def test_two_prompts_of_two_lengths_run_compiled(run: Run) -> None:
    run.check(tokens=21, negative_tokens=5)


def test_reference_images_run_compiled(run: Run) -> None:
    if run.kind not in REFERRING:
        pytest.skip("takes no reference images")
    one, two = (transformers.reference(run.kind, *size) for size in ((8, 8), (6, 10)))
    plain = run.sample()
    run.check(reference_latents=[one], **REFERRING[run.kind])
    run.check(12, 10, 2, 5, reference_latents=[one, two], **REFERRING[run.kind])
    given = run.sample(reference_latents=[one], **REFERRING[run.kind])
    assert not torch.equal(given, plain)


def test_reference_images_with_a_timestep_of_their_own_are_the_hosts_and_named(run: Run) -> None:
    """As the host's node for how references are looked at sets them (`index_timestep_zero`)."""
    if run.kind not in REFERRING or run.kind in ("flux1", "qwen21"):  # which knows no other way
        pytest.skip("takes no such reference images")
    facts = {
        "reference_latents": [transformers.reference(run.kind, 6, 10)],
        "reference_latents_method": "index_timestep_zero",
    }
    if run.kind == "qwen":  # whose blocks have another way for them
        run.check(**facts)
        return
    run.sample(**facts)
    assert max(call.error for call in run.probe.calls) <= TOLERANCE
    report = run.lab.engine.report(run.model)
    assert {entry["reason"] for entry in report["eager"]} == {dit.REFERENCES}
    run.check(reference_latents=facts["reference_latents"], **REFERRING[run.kind])


def test_frames_with_timesteps_of_their_own_run_compiled(run: Run) -> None:
    """What Wan 2.2's 5B and Cosmos Predict2 do with an image to begin with."""
    if run.kind not in ("wan_5b", "anima", "predict2_video"):
        pytest.skip("gives all frames one timestep")
    if run.kind == "anima":  # of which Cosmos' model for images is made, too
        run = Run(run.host, run.lab, "predict2")
    latent = transformers.latent(run.kind, 8, 12, frames=3)
    latent["noise_mask"] = torch.ones(1, 1, 3, 8, 12)
    latent["noise_mask"][:, :, 0] = 0
    jobs = run.lab.jobs()
    run.sample(latent=latent)
    assert max(call.error for call in run.probe.calls) <= TOLERANCE
    (eager,) = run.lab.engine.report(run.model)["eager"]
    assert eager["reason"] == "called with a timestep for each frame" and run.lab.jobs() == jobs
    if run.kind == "predict2":
        assert eager["places"] == run.expected.places
    else:
        assert eager["examples"] == ["head" if run.kind == "wan_5b" else "final_layer"]


def test_masked_texts_and_guiding_frames_are_the_hosts(run: Run) -> None:
    """As the host's node for a HunyuanVideo of an image has them guide ("v2 (replace)")."""
    if run.kind != "hunyuan":
        pytest.skip("is not called with either")
    mask = torch.ones(1, 13, dtype=torch.long)
    mask[:, 9:] = 0
    for facts, reason in (
        ({"attention_mask": mask}, dit.MASKED),
        ({"guiding_frame_index": 0}, dit.REFERENCES),
    ):
        run.sample(12, 10, frames=3, cfg=1.0, **facts)  # the host's masks are for one row
        assert max(call.error for call in run.probe.calls) <= TOLERANCE
        report = run.lab.engine.report(run.model)
        assert {entry["reason"] for entry in report["eager"]} == {reason}
        run.check(12, 10, frames=3)


def test_words_to_write_and_a_seen_image_are_more_tokens_of_a_text(run: Run) -> None:
    if run.kind != "hunyuan_15":
        pytest.skip("takes neither")
    from comfy.clip_vision import Output

    seen = Output()
    seen.last_hidden_state = torch.rand(1, 29, 1152)
    plain = run.sample()
    for facts in ({"conditioning_byt5small": torch.rand(1, 7, 1472)}, {"clip_vision_output": seen}):
        run.check(**facts)
        assert not torch.equal(run.sample(**facts), plain)


def test_graphs_hang_on_the_hosts_library_of_kernels(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if run.kind != "flux2":
        pytest.skip("the same for all whose positions it rotates")

    def keys() -> list[str]:
        model = run.lab.compiled(run.plain, when_missing="never")
        run.lab.settle()
        return [kind["key"] for kind in run.lab.engine.report(model)["kinds"]]

    before = keys()
    monkeypatch.setattr(kitchen, "version", lambda: "99.0")
    moved = [key for key in keys() if key not in before]
    assert len(moved) == 2  # both sorts of blocks, not the last layer
    monkeypatch.undo()
    assert keys() == before


def test_warm_up_runs_empty_steps_compiled(run: Run) -> None:
    run.probe.calls.clear()
    report = run.lab.engine.warm_up(run.model, [(128, 192), (64, 64)], [2])
    assert report["regions"]["eager"] == 0 and len(run.probe.calls) == 2
    rows = 4 if run.kind in GUIDED else 2
    assert {call.shape[0] for call in run.probe.calls} == {rows}
    # Without any bias a model makes nothing of nothing.
    assert all(call.is_equal or call.error <= TOLERANCE for call in run.probe.calls)


@pytest.mark.slow
def test_calls_too_large_for_32_bits_get_second_graphs_for_later_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if run.kind != "zimage":
        pytest.skip("the same for all")
    lab = run.lab.copy_to(tmp_path)
    try:
        again = Run(run.host, lab, run.kind)
        again.check()
        monkeypatch.setattr(input_guard, "MAX_ELEMENTS", 0)
        large = Run(run.host, lab, run.kind)
        large.sample(12, 10)
        (reason,) = {entry["reason"] for entry in lab.engine.report(large.model)["eager"]}
        assert "more elements than a compiled graph with 32-bit indices can address" in reason
        large.sample(12, 10)
        scope = large.model.get_attachment("warmgraph").scope
        lab.wait_until(lambda: not any(graph.is_pending for graph in scope.second_graphs))
        large.sample(12, 10)
        report = lab.engine.report(large.model)
        assert report["regions"]["eager"] == 0, report["eager"]
        ready = [{"wide": "ready"}] * large.expected.kinds
        assert [kind["variants"] for kind in report["kinds"]] == ready
        assert lab.jobs() == large.expected.kinds
        assert max(call.error for call in large.probe.calls) <= TOLERANCE
    finally:
        lab.engine.close()


def test_variants_run_through_the_graphs_of_their_blocks(run: Run, tmp_path: Path) -> None:
    if run.kind not in VARIANTS:
        pytest.skip("has no variants here")
    lab = run.lab.copy_to(tmp_path)
    builds = 1  # at most a head for the latents of Wan 2.1
    try:
        for kind in VARIANTS[run.kind]:
            again = Run(run.host, lab, kind)
            builds += kind in OWN_BLOCKS
            sides = (16, 8) if kind == "wan_dancer" else (12, 10)  # it hears eight times a frame
            extras = transformers.extras(kind, *sides, 2)
            cfg = 1.0 if extras else 3.0
            again.sample(*sides, 2, 7, frames=2, cfg=cfg, **extras)
            assert lab.jobs() <= builds
            report = lab.engine.report(again.model)
            places = again.expected.places - again.expected.others
            timed = kind == "wan_s2v"  # and its head is the host's
            assert sum(entry["places"] for entry in report["eager"]) == timed, report["eager"]
            assert report["calls"]["compiled"] == len(again.probe.calls) * (places - timed) > 0
            assert max(call.error for call in again.probe.calls) <= TOLERANCE
            jobs, larger = lab.jobs(), (24, 16)
            extras = transformers.extras(kind, *larger, 3)
            again.sample(*larger, 1, 30, frames=3, cfg=cfg, **extras)
            assert lab.jobs() == jobs
            assert max(call.error for call in again.probe.calls) <= TOLERANCE
            if timed:
                _check_motion(again)
            if kind == "wan_vace":  # whose own blocks call the plain ones' code
                kinds = again.model.get_attachment("warmgraph").scope.kinds
                hints = next(k for k in kinds if k.graph.description.form == "hint_block")
                plain = "comfy.ldm.wan.model:WanAttentionBlock.forward"
                assert plain in hints.graph.description.sources
    finally:
        lab.engine.close()


def _check_motion(run: Run) -> None:
    """Frames that went before are tokens with timesteps of their own, of a frame's half each, where
    latents have sides of whole eights.
    """
    reasons = {"called with a timestep for each frame"}
    for height, width in ((8, 16), (12, 10)):
        extras = transformers.extras(run.kind, height, width, 2)
        extras["reference_motion"] = transformers.latent(run.kind, height, width, frames=19)[
            "samples"
        ]
        run.sample(height, width, frames=2, cfg=1.0, **extras)
        if width == 10:
            reasons.add("called with timesteps whose shares of the tokens are not equal")
        report = run.lab.engine.report(run.model)
        assert {entry["reason"] for entry in report["eager"]} == reasons
        assert max(call.error for call in run.probe.calls) <= TOLERANCE


def test_a_fresh_engine_loads_what_was_built(run: Run, tmp_path: Path) -> None:
    lab = run.lab.copy_to(tmp_path)
    try:
        again = Run(run.host, lab, run.kind)
        again.check(10, 14, 2, 9)
        assert lab.jobs() == 0
    finally:
        lab.engine.close()


@pytest.mark.slow
def test_a_model_in_float16_may_keep_float32_between_its_blocks(host: Host, shared: Lab) -> None:
    run = Run(host, shared, "anima", dtype=torch.float16)
    block = run.plain.model.diffusion_model.blocks[0]
    given = []
    hook = block.register_forward_pre_hook(lambda _, args: given.extend(a.dtype for a in args[:3]))
    run.sample(model=run.plain)
    hook.remove()
    assert given[:3] == [torch.float32, torch.float16, torch.float16]
    for size in ((8, 8, 1, 13), (12, 10, 2, 5)):
        run.sample(*size, frames=2)
        assert max(call.error for call in run.probe.calls) <= 5e-3
    report = run.lab.engine.report(run.model)
    assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
