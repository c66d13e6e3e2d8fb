"""Diffusion transformers run compiled: the host's own blocks, any size, batch and text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.families import dit
from warmgraph_backends.host_api import kitchen
from warmgraph_backends.host_api.attention import replaceable
from warmgraph_backends.runtime import region
from warmgraph_backends.runtime.wiring import Wiring
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .blocks import check_blocks
from .elsewhere import block_classes, check_one_more_argument
from .lab import TOLERANCE, Lab, relative
from .transformer_runs import EXPECTED, Run, keeping_nothing

SIZES = ((8, 8, 1, 13), (17, 31, 1, 300), (12, 10, 2, 1), (16, 16, 4, 77))
ATTENTION = "optimized_attention_override"
IMAGE = torch.rand(1, 64, 96, 3, generator=torch.Generator().manual_seed(0))


# What others take, too, or next to it: their builds are for `--all`.
SLOW = (
    *("flux1", "chroma", "lumina2", "sd3", "hunyuan", "hunyuan_15"),
    *("krea", "wan_image", "wan_5b", "anima", "predict2_video"),
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
# Which have blocks of a sort of their own besides.
OWN_BLOCKS = ("wan_vace", "wan_humo")
# Whose blocks add to what they are given.
_FLUX = {"DoubleStreamBlock", "SingleStreamBlock"}
WRITING = dict.fromkeys(("flux1", "flux2", "chroma", "hunyuan", "hunyuan_15"), _FLUX)
WRITING["qwen21"] = {"QwenImage21TransformerBlock"}
# Whose blocks the host lets nobody patch.
UNPATCHED = ("sd3",)
# Whose texts are padded to one length, so that guidance makes one call of two prompts.
GUIDED = ("wan", "wan_image", "wan_5b", "sd3", "anima", "predict2_video")
# Whose hosts have no place for another block in a block's.
WITHOUT_PLACES = ("zimage", "lumina2", "krea", "anima", "predict2_video")
# Of which other nodes may change what goes from block to block, and by which names.
BETWEEN = {
    "flux1": ("post_input",),
    "flux2": ("post_input",),
    "zimage": ("noise_refiner", "double_block"),
    "lumina2": ("noise_refiner", "double_block"),
    "qwen": ("post_input", "double_block"),
    "qwen21": ("post_input", "single_block"),
    "krea": ("post_input",),
    "wan": ("double_block",),
    "wan_image": ("double_block",),
    "wan_5b": ("double_block",),
}
# Which take reference images, and what the host has to be told for it.
REFERRING: dict[str, dict[str, Any]] = {
    "flux1": {},
    "flux2": {},
    "qwen": {},
    "qwen21": {},
    "krea": {"reference_latents_method": "index"},
}
FAMILIES = [
    pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else [])
    for kind in EXPECTED
    if kind not in sum(VARIANTS.values(), ELSEWHERE)
]


@pytest.fixture(scope="module", params=FAMILIES)
def run(host: Host, shared: Lab, request: Any) -> Run:
    if not transformers.is_there(request.param):
        pytest.skip(f"this ComfyUI has no {request.param}")
    run = Run(host, shared, request.param)
    run.sample()
    return run


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


def test_two_prompts_of_two_lengths_run_compiled(run: Run) -> None:
    run.check(tokens=21, negative_tokens=5)


def test_attention_is_what_the_options_say_once_for_each_and_stays_compiled(run: Run) -> None:
    """As nodes for SageAttention do it; the result is the override's, not the host's."""
    from comfy.ldm.modules.attention import attention_pytorch

    calls: list[Any] = []

    def halved(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(function)
        return 0.5 * attention_pytorch(*args, **kwargs)

    plain = run.sample()
    clone = run.model.clone()
    clone.model_options["transformer_options"][ATTENTION] = halved
    run.check(model=clone)
    # Once by ours and once by eager's call, which the probe holds beside it.
    assert len(calls) == 2 * run.expected.attentions * len(run.probe.calls)
    assert not torch.equal(run.sample(model=clone), plain)
    run.check()


def test_the_attention_of_another_start_option_is_called_through_the_same_graphs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--use-split-cross-attention` or `--use-sage-attention` has the host import it."""
    from comfy.ldm.modules import attention

    calls = []

    @attention.wrap_attn
    def other(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return attention.attention_split(*args, **kwargs)

    usual = attention.optimized_attention
    for name, module in list(sys.modules.items()):
        if name.startswith("comfy."):
            for place in [place for place, value in vars(module).items() if value is usual]:
                if place.startswith("optimized_attention"):
                    monkeypatch.setattr(module, place, other)
    again = Run(run.host, run.lab, run.kind)
    again.check(12, 10, 2, 5)
    assert len(calls) == 2 * run.expected.attentions * len(again.probe.calls)
    # One that looks at no options is a part of the graph, and so another's block eager.
    monkeypatch.setattr(attention, "optimized_attention", lambda *_, **__: None)
    assert replaceable() is None


def test_attention_may_hand_back_one_of_its_inputs(run: Run) -> None:
    """As perturbed attention does: memory that the graph goes on writing into."""

    def values(function: Any, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
        given = v if v.shape == q.shape else torch.zeros_like(q)
        return given.transpose(1, 2).flatten(2) if given.dim() == 4 else given

    clone = run.model.clone()
    clone.model_options["transformer_options"][ATTENTION] = values
    run.check(model=clone)


def test_what_attention_raises_passes_and_runs_once_and_the_graph_stays(run: Run) -> None:
    calls = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        raise ValueError("no such kernel on this card")

    clone = run.model.clone()
    run.probe.is_off = True
    try:
        clone.model_options["transformer_options"][ATTENTION] = broken
        with pytest.raises(ValueError, match="no such kernel on this card"):
            run.sample(model=clone)
    finally:
        run.probe.is_off = False
    assert len(calls) == 1
    run.check()


def test_patches_within_blocks_leave_them_to_the_host_and_those_between_do_not(run: Run) -> None:
    clone = run.model.clone()
    clone.set_model_attn1_patch(lambda *args, **kwargs: pytest.fail("no block of these calls it"))
    clone.model_options["transformer_options"]["patches"]["attn1_patch"] = []
    run.sample(model=clone)
    reasons = {entry["reason"] for entry in run.lab.engine.report(clone)["eager"]}
    assert reasons == (set() if run.kind in UNPATCHED else {"another node patches attn1_patch"})
    assert max(call.error for call in run.probe.calls) <= TOLERANCE

    seen = []

    def replacement(args: Any, extra: Any) -> Any:
        seen.append(args)
        return extra["original_block"](args)

    clone = run.model.clone()
    for block in ("double_block", "single_block"):
        clone.set_model_patch_replace(replacement, "dit", block, 0)
    run.check(model=clone)
    assert bool(seen) == (run.kind not in WITHOUT_PLACES)


def test_patches_of_what_goes_from_block_to_block_act_on_compiled_ones(run: Run) -> None:
    """As nodes for a model's own ControlNets set them."""
    if run.kind not in BETWEEN:
        pytest.skip("has no such place")
    plain = run.sample()
    for name in BETWEEN[run.kind]:

        def halved(given: dict[str, Any]) -> dict[str, Any]:
            return {**given, "img": 0.5 * given["img"]}

        clone = run.model.clone()
        clone.set_model_patch(halved, name)
        run.check(model=clone)
        assert relative(run.sample(model=clone), plain) > 10 * TOLERANCE, name


def test_patches_that_cosmos_blocks_call_act_in_the_hosts(run: Run) -> None:
    """As the host's node for a LLLite of Anima sets them."""
    if run.kind != "anima":
        pytest.skip("its blocks call others")

    def queries(q: Any, k: Any, v: Any, **_: Any) -> dict[str, Any]:
        return {"q": 0.5 * q}

    def inputs(args: dict[str, Any]) -> dict[str, Any]:
        return {**args, "x": 0.5 * args["x"]}

    plain = run.sample()
    for name, patch in (("attn1_patch", queries), ("attn2_patch", queries), ("mlp_patch", inputs)):
        clone = run.model.clone()
        clone.set_model_patch(patch, name)
        assert not torch.equal(run.sample(model=clone), plain)
        assert max(call.error for call in run.probe.calls) <= TOLERANCE
        (eager,) = run.lab.engine.report(clone)["eager"]
        assert (eager["reason"], eager["places"]) == (f"another node patches {name}", 2)
    run.check()


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


def test_a_step_cache_in_the_models_place_is_served_and_would_not_be_captured(run: Run) -> None:
    """As TeaCache and WaveSpeed have it: what it decides in one call is no rule for the next."""
    root = run.plain.model.diffusion_model
    if not hasattr(root, "forward_orig"):
        pytest.skip("has no method that step caches replace")
    wiring = Wiring(root)
    before = wiring.marks()
    assert wiring.foreign() is None

    def cached(*args: Any, **kwargs: Any) -> Any:
        return type(root).forward_orig(root, *args, **kwargs)

    root.forward_orig = cached
    try:
        cls = type(root).__name__
        assert wiring.foreign() == f"another node replaces forward_orig of this {cls}"
        assert wiring.marks() != before
        run.check()
    finally:
        del root.forward_orig
    assert wiring.foreign() is None and wiring.marks() == before


class Together(torch.nn.Module):
    """A pack's module that goes through the host's blocks of Wan."""

    def __init__(self, blocks: torch.nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, **given)
        return x


def test_a_step_cache_in_the_place_of_a_list_of_blocks_is_named_and_its_blocks_the_hosts(
    run: Run,
) -> None:
    """As WaveSpeed has it, within each call: nor would such a call be captured."""
    if run.kind != "wan_5b":
        pytest.skip("the same for all")
    root = run.plain.model.diffusion_model
    wiring, blocks = Wiring(root), root.blocks

    def around(call: Any, given: dict[str, Any]) -> Any:
        root.blocks = torch.nn.ModuleList([Together(blocks)])
        try:
            assert wiring.changed()
            assert Wiring(root).foreign() == "another node replaces the code of Together"
            return call(given["input"], given["timestep"], **given["c"])
        finally:
            root.blocks = blocks

    clone = run.model.clone()
    clone.set_model_unet_function_wrapper(around)
    run.sample(model=clone)
    assert max(call.error for call in run.probe.calls) <= TOLERANCE
    (eager,) = run.lab.engine.report(clone)["eager"]
    assert eager["reason"].startswith("Together is another node's own class")
    assert not wiring.changed()
    run.check()


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


def test_a_lora_changes_the_image_and_no_kind(run: Run) -> None:
    clone = with_lora(run)
    plain = run.sample()
    run.check(model=clone)
    assert not torch.equal(run.sample(model=clone), plain)
    run.check()
    assert torch.equal(run.sample(), plain)


def with_lora(run: Run, strength: float = 0.05) -> Any:
    """A clone of the compiled model under a LoRA on one product."""
    key, clone = run.key(), run.model.clone()
    weight = dict(run.plain.model.named_parameters())[key]
    delta = torch.randn(weight.shape, generator=torch.Generator().manual_seed(9))
    assert clone.add_patches({key: ("diff", (strength * delta,))}) == [key]
    return clone


def test_a_lora_of_one_conditioning_is_the_hosts_to_apply_and_no_kind(run: Run) -> None:
    """As the host's nodes for hooks make one."""
    import comfy.hooks

    rows, columns = dict(run.plain.model.named_parameters())[run.key()].shape
    generator = torch.Generator().manual_seed(9)
    name = run.key().removesuffix(".weight")
    plain = run.sample()
    lora = {
        f"{name}.lora_up.weight": torch.randn(rows, 4, generator=generator),
        f"{name}.lora_down.weight": torch.randn(4, columns, generator=generator) / columns**0.5,
    }
    hooks = comfy.hooks.create_hook_lora(lora=lora, strength_model=1.0, strength_clip=0.0)
    run.check(hooks=hooks)
    assert not torch.equal(run.sample(hooks=hooks), plain)
    run.check()
    assert torch.equal(run.sample(), plain)


def test_weights_that_are_made_anew_in_each_call_build_nothing(run: Run) -> None:
    """A wrapper of a weight, and a LoRA over a model that does not fit."""
    plain = run.sample()
    clone = run.model.clone()
    clone.add_weight_wrapper(run.key(), lambda weight: weight * -2.0)
    run.check(model=clone)
    assert not torch.equal(run.sample(model=clone), plain)
    run.check()
    loaded = run.sample(model=with_lora(run))
    for strength in (0.05, 0.1):
        clone = with_lora(run, strength)
        functions: list[Any] = []
        _keep_nothing_loaded(clone, functions)
        run.check(model=clone)
        assert functions, "the host must apply the LoRA in each call here"
        streamed = run.sample(model=clone)
        if strength == 0.05:
            assert relative(streamed, loaded) < TOLERANCE
        else:
            assert not torch.equal(streamed, loaded)
    run.check()
    assert torch.equal(run.sample(), plain)


def _keep_nothing_loaded(model: Any, functions: list[Any]) -> None:
    """Have the host stream all of a model's weights, as where none fits; keep what it puts on top
    of them.
    """
    from comfy.patcher_extension import CallbacksMP

    def partly(patcher: Any) -> None:
        patcher.unpatch_model(patcher.offload_device)
        patcher.patch_model(patcher.load_device, lowvram_model_memory=1)
        for layer in patcher.model.modules():
            functions.extend(getattr(layer, "weight_function", ()))

    model.add_callback(CallbacksMP.ON_PRE_RUN, partly)


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
        monkeypatch.setattr(region, "MAX_ELEMENTS", 0)
        large = Run(run.host, lab, run.kind)
        large.sample(12, 10)
        (reason,) = {entry["reason"] for entry in lab.engine.report(large.model)["eager"]}
        assert "more elements than a compiled file with 32-bit indices can address" in reason
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


# --- weights in fp8 -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wan", "flux1", "zimage"])
def test_weights_in_plain_fp8_are_cast_for_each_call(host: Host, shared: Lab, kind: str) -> None:
    """As the loader's `weight_dtype` stores those of a file that is not quantised."""
    run = Run(host, shared, kind, stored=torch.float8_e4m3fn)
    assert run.plain.model.diffusion_model.dtype == torch.float8_e4m3fn
    plain = run.sample()
    # Wan's blocks have parameters that are no layer's, and older GPUs' graphs cannot read fp8.
    kinds = run.model.get_attachment("warmgraph").scope.kinds
    assert not any("float8" in repr(kind.graph.description) for kind in kinds)
    for size in ((8, 8, 1, 13), (12, 10, 2, 5)):
        run.check(*size)
    for strength in (0.05, 0.1):
        clone = with_lora(run, strength)
        run.check(model=clone)
        assert not torch.equal(run.sample(model=clone), plain)
    run.check()
