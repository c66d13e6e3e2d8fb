"""Models of video and audio run compiled: LTX-Video, LTX-2 and MiniMax H3, whatever is put into
them.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.plans.plan import Plan
from warmgraph_backends.plans.specs import describe_place
from warmgraph_backends.runtime import verifier
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .av_runs import AvRun, generator, guided, known_frame
from .blocks import check_blocks
from .lab import TOLERANCE, Lab, assert_same_calls, relative
from .others import bypassed, called, lora_of, products
from .quantised_runs import QUANTISED

SLOW = pytest.mark.slow
LTX = ("ltx23", "ltx2")
H3 = ("h3_curves", "h3")


@pytest.fixture(
    scope="module",
    params=["ltxv", *(pytest.param(kind, marks=SLOW) for kind in LTX)],
)
def ltx(host: Host, shared: Lab, request: Any) -> AvRun:
    run = AvRun(host, shared, request.param)
    run.sample()
    return run


@pytest.fixture(scope="module", params=["h3_curves", pytest.param("h3", marks=SLOW)])
def h3(host: Host, shared: Lab, request: Any) -> AvRun:
    run = AvRun(host, shared, request.param)
    run.sample()
    return run


def test_ltx_of_any_size_length_batch_and_text_runs_compiled(ltx: AvRun) -> None:
    report = ltx.check(3, 4, 6)
    assert report["regions"] == {"total": 2, "compiled": 2, "eager": 0}
    ltx.check(5, 7, 4, batch=3, cfg=3.0, sounds=41)
    ltx.check(1, 1, 1, sounds=1, tokens=300, negative_tokens=5, cfg=3.0)


def test_ltx_with_known_frames_or_parts_of_them_runs_compiled(ltx: AvRun) -> None:
    for change in (known_frame(), known_frame(0.4), known_frame(part=0.5)):
        ltx.check(4, 5, 4, change=change, batch=2)


def test_ltx_with_guides_of_any_strength_runs_compiled(ltx: AvRun) -> None:
    for strengths in ((1.0,), (0.7, 1.0)):
        ltx.check(4, 5, 4, change=guided(*strengths), cfg=3.0, negative_tokens=5)


def test_ltx_with_a_masked_text_runs_compiled(ltx: AvRun) -> None:
    mask = torch.ones(1, 13, dtype=torch.long)
    mask[:, 9:] = 0
    ltx.check(attention_mask=mask)
    ltx.check(change=guided(0.7), attention_mask=mask)


@SLOW
def test_ltx_with_reference_audio_runs_compiled(host: Host, shared: Lab) -> None:
    run = AvRun(host, shared, "ltx23")
    sound = torch.randn(1, 5, 128, generator=generator(6))
    run.check(ref_audio={"tokens": sound})
    run.check(ref_audio={"tokens": sound}, change=known_frame(), sounds=11)


def test_h3_of_any_size_length_and_text_runs_compiled(h3: AvRun) -> None:
    report = h3.check(4, 6, 2)
    assert report["regions"] == {"total": 2, "compiled": 2, "eager": 0}
    h3.check(5, 7, 7, sounds=41, tokens=300, negative_tokens=5, cfg=3.0)
    h3.check(2, 2, 2, sounds=1, tokens=1)


def test_h3_with_keyframes_references_and_tags_runs_compiled(h3: AvRun) -> None:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator(3))

    first = {"resolved_frame_index": 0, "latent": noise(1, 24, 1, 4, 6)}
    h3.check(4, 6, 7, minimax_keyframes=[first], minimax_frame_count=22)
    image = {"kind": "image", "latent_h": 4, "latent_w": 4, "latent": noise(1, 24, 1, 4, 4)}
    audio = {"kind": "audio", "ref_audio_t": 5, "audio_latent": noise(1, 32, 2, 5)}
    h3.check(4, 6, 2, minimax_refs=[image, audio])
    tags = torch.tensor([[1] * 5 + [0] * 4 + [1] * 4])
    h3.check(4, 6, 2, minimax_token_tags=tags)


def test_warm_up_runs_an_empty_step_of_ltx(ltx: AvRun) -> None:
    _check_warm_up(ltx, batch=2)


def test_warm_up_runs_an_empty_step_of_h3(h3: AvRun) -> None:
    _check_warm_up(h3, batch=1)


def _check_warm_up(run: AvRun, *, batch: int) -> None:
    run.probe.calls.clear()
    report = run.lab.engine.warm_up(run.model, [(256, 192)], [batch])
    assert report["notes"] == [] and report["regions"]["eager"] == 0
    [call] = run.probe.calls
    assert call.error <= TOLERANCE and call.shape[1] == transformers.KINDS[run.kind].channels


def test_h3_may_be_called_within_somebody_elses_code_and_says_what_is_not_compiled(
    h3: AvRun,
) -> None:
    """As a pack that replaces blocks does it, with a block of its own called in between."""
    seen: list[Any] = []

    def replacement(args: Any, extra: Any) -> Any:
        seen.append(args)
        return extra["original_block"](args)

    clone = h3.model.clone()
    for number in range(h3.blocks):
        clone.set_model_patch_replace(replacement, "dit", "double_block", number)
    h3.check(4, 6, 2, model=clone)
    assert len(seen) == 2 * h3.blocks  # once by eager's call


def test_ltx_leaves_blocks_without_one_of_their_parts_to_the_host(ltx: AvRun) -> None:
    if ltx.kind == "ltxv":
        pytest.skip("has one stream")
    clone = ltx.model.clone()
    clone.model_options["transformer_options"]["a2v_cross_attn"] = False
    left = {"called without one of its streams, or what joins them": 2}
    ltx.check(model=clone, left=left)
    video = transformers.latent("ltxv", 4, 4, frames=2)
    ltx.check(left=left, change=lambda _, prompt: (video, prompt))
    ltx.check()


# --- what newer hosts have ------------------------------------------------------------------------


@SLOW
def test_ltx_25_runs_compiled_where_the_host_has_it(host: Host, shared: Lab) -> None:
    from comfy.ldm.lightricks.av_model import BasicAVTransformerBlock

    if "ff_bias" not in inspect.signature(BasicAVTransformerBlock.__init__).parameters:
        pytest.skip("needs ComfyUI 0.33")
    run = AvRun(host, shared, "ltx25")
    run.sample()
    run.check(5, 7, 4, batch=2, cfg=3.0, sounds=41)
    run.check(4, 5, 4, change=guided(0.7), cfg=3.0)
    clone = run.model.clone()
    clone.model_options["transformer_options"]["stg_self_attn_blocks"] = {1}
    run.check(model=clone, left={"called with its self-attention left out": 1})


@SLOW
def test_h3_with_masks_runs_compiled_where_the_host_heeds_them(host: Host, h3: AvRun) -> None:
    """Rows have timesteps of their own then."""
    import comfy.ldm.minimax.model as minimax

    if not hasattr(minimax, "mask_row_values"):
        pytest.skip("needs ComfyUI 0.33")

    def masked(latent: dict[str, Any], prompt: Any) -> tuple[dict[str, Any], Any]:
        from comfy.nested_tensor import NestedTensor

        video, audio = latent["samples"].unbind()
        of_video = torch.ones(1, 1, *video.shape[2:])
        of_video[:, :, :1, :2] = 0.0
        of_video[:, :, 1:, 2:] = 0.5
        of_audio = torch.ones_like(audio)
        of_audio[..., :3] = 0.25
        return {**latent, "noise_mask": NestedTensor((of_video, of_audio))}, prompt

    h3.check(4, 6, 7, sounds=9, change=masked, steps=2)


# --- what others do to them -----------------------------------------------------------------------


def _check_blocks(run: AvRun, written: str) -> None:
    scope = run.model.get_attachment("warmgraph").scope
    assert check_blocks(scope, lambda: run.sample(model=run.plain)) == {written}


def test_blocks_of_ltx_leave_in_their_inputs_what_the_hosts_do(ltx: AvRun) -> None:
    two = ltx.kind != "ltxv"
    _check_blocks(ltx, "BasicAVTransformerBlock" if two else "BasicTransformerBlock")


def test_blocks_of_h3_leave_in_their_inputs_what_the_hosts_do(h3: AvRun) -> None:
    _check_blocks(h3, "DiTBlock")


def _with_attention(run: AvRun) -> None:
    """As nodes for SageAttention do it; the result is the override's, not the host's."""
    from comfy.ldm.modules.attention import attention_pytorch

    calls: list[torch.Tensor] = []

    def halved(function: Any, *args: Any, **kwargs: Any) -> Any:
        result = attention_pytorch(*args, **kwargs)
        calls.append(result)
        return 0.5 * result

    plain = run.sample()
    clone = run.model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = halved
    run.check(model=clone)
    assert calls and len(calls) % (2 * run.blocks) == 0
    assert_same_calls(calls, len(run.probe.calls))
    assert not torch.equal(run.sample(model=clone)[0], plain[0])


def test_attention_of_ltx_is_what_the_options_say(ltx: AvRun) -> None:
    _with_attention(ltx)


def test_attention_of_h3_is_what_the_options_say(h3: AvRun) -> None:
    _with_attention(h3)


class Perturbed:
    """As guiders perturb one stream: in a block's place it calls the block with the host's
    attention replaced, of which calls with some numbers give their values.
    """

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.counts = numbers, list[int]()

    def __call__(self, args: Any, extra: Any) -> Any:
        import comfy.ldm.modules.attention as attention

        names = ("optimized_attention", "optimized_attention_masked")
        hosts = [getattr(attention, name) for name in names]
        count = 0

        def counting(host: Any) -> Any:
            def attend(q: Any, k: Any, v: Any, heads: int, *rest: Any, **named: Any) -> Any:
                nonlocal count
                count += 1
                return v if count - 1 in self.numbers else host(q, k, v, heads, *rest, **named)

            return attend

        try:
            for name, host in zip(names, hosts, strict=True):
                setattr(attention, name, counting(host))
            return extra["original_block"](args)
        finally:
            for name, host in zip(names, hosts, strict=True):
                setattr(attention, name, host)
            self.counts.append(count)


def test_a_node_that_counts_the_attentions_of_a_block_perturbs_the_stream_that_it_means(
    ltx: AvRun,
) -> None:
    """The host attends within video, from video to text, within audio, and so on."""
    plain = ltx.sample()
    for number in (0,) if ltx.kind == "ltxv" else (0, 2):
        clone, perturbed = ltx.model.clone(), Perturbed(number)
        clone.set_model_patch_replace(perturbed, "dit", "double_block", 1)
        ltx.check(model=clone)
        ltx.check(5, 7, 4, model=clone, batch=2, cfg=3.0, sounds=41, negative_tokens=5)
        assert set(perturbed.counts) == {2 if ltx.kind == "ltxv" else 6}
        parts = ltx.sample(model=clone)
        assert max(relative(a, b) for a, b in zip(parts, plain, strict=True)) > 1e-3


def _with_a_lora(run: AvRun, name: str) -> None:
    jobs, plain = run.lab.jobs(), run.sample()[0]
    weight = run.root.get_submodule(name).weight
    change = 0.1 * torch.randn(weight.shape, generator=generator(9))
    clone = run.model.clone()
    key = f"diffusion_model.{name}.weight"
    assert clone.add_patches({key: ("diff", (change,))}, 0.5) == [key]
    run.check(model=clone)
    assert relative(run.sample(model=clone)[0], plain) > 1e-4
    assert torch.equal(run.sample()[0], plain) and run.lab.jobs() == jobs


def test_a_lora_on_ltx_builds_nothing(ltx: AvRun) -> None:
    _with_a_lora(ltx, "transformer_blocks.1.attn1.to_q")


def test_a_lora_on_h3_builds_nothing(h3: AvRun) -> None:
    _with_a_lora(h3, "blocks.1.attn.qkv_proj")


def _with_others_code(run: AvRun, path: str, blocks: str) -> None:
    """As negative guidance puts its own forward on the attention to a text: compiled around it."""
    plain = transformers.load(run.kind)

    def patch(model: Any) -> Any:
        clone = model.clone()
        for i in range(run.blocks):
            part = plain.model.diffusion_model.get_submodule(f"{blocks}.{i}.{path}")

            def forward(*args: Any, part: Any = part, **named: Any) -> Any:
                return 1.3 * type(part).forward(part, *args, **named)

            clone.add_object_patch(f"diffusion_model.{blocks}.{i}.{path}.forward", forward)
        return clone

    before, eager = run.sample(model=plain), run.sample(model=patch(plain))
    assert max(map(relative, before, eager)) > 1e-3
    ours = patch(run.lab.compiled(plain))
    run.sample(model=ours)
    run.lab.wait_until(lambda: run.lab.is_settled(ours))
    run.lab.settle()
    assert max(map(relative, run.sample(model=ours), eager)) < TOLERANCE
    report = run.lab.engine.report(ours)
    assert report["eager"] == []
    assert sum(called(report).values()) == run.blocks


@SLOW
def test_others_code_in_an_attention_of_ltx_is_called_within_the_graph(ltx: AvRun) -> None:
    for path in ("attn2", "attn1") if ltx.kind == "ltxv" else ("audio_attn2",):
        _with_others_code(ltx, path, "transformer_blocks")


@SLOW
@pytest.mark.parametrize("form", [None, "int8"])
def test_a_lora_in_bypass_mode_on_all_products_of_h3_leaves_its_blocks_compiled(
    h3: AvRun, form: str | None
) -> None:
    """Of an int8 product after an activation the host takes the weight, and not that code."""
    plain = transformers.load(h3.kind)
    if form is not None:
        plain = transformers.load_quantised(h3.kind, form)
    names = [n for n in products(plain) if ".token_refiner." not in n and "adaln" not in n]
    assert len(names) == 4 * h3.blocks
    theirs = bypassed(lora_of(plain, names, scale=0.2))
    tolerance = TOLERANCE if form is None else 4 * QUANTISED
    before, eager = h3.sample(model=plain), h3.sample(model=theirs(plain))
    assert max(map(relative, before, eager)) > 2 * tolerance
    ours = theirs(h3.lab.compiled(plain))
    for _ in range(2):
        assert max(map(relative, h3.sample(model=ours), eager)) < tolerance
    report = h3.lab.engine.report(ours)
    assert report["eager"] == [] and sum(called(report).values()) >= len(names)


@SLOW
def test_others_code_in_a_feed_forward_of_h3_is_called_within_the_graph(h3: AvRun) -> None:
    _with_others_code(h3, "mlp", "blocks")


def test_the_host_brings_nothing_ahead_once_all_weights_are_there(h3: AvRun) -> None:
    """It asks for each layer of each block; in the first step of a run some may have to come."""
    from comfy.patcher_extension import WrappersMP

    name, seen = "prefetch_dynamic_vbars", []

    def asks(executor: Any, *args: Any, **kwargs: Any) -> Any:
        args[3][name] = True  # as the host has it with dynamic VRAM
        result = executor(*args, **kwargs)
        assert args[3][name] is True
        return result

    def notes(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(args[3][name])
        return executor(*args, **kwargs)

    outer = transformers.load(h3.kind).clone()
    outer.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "asks", asks)
    inner = h3.lab.compiled(outer).clone()
    inner.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "notes", notes)
    for _ in range(2):
        seen.clear()
        h3.sample(model=inner, steps=4)
        assert seen == [True, False, False, False]
    assert h3.lab.engine.report(inner)["regions"]["eager"] == 0


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("h3_curves", "int8_convrot"),
        *(pytest.param("h3_curves", form, marks=SLOW) for form in ("int8", "fp8_e4m3fn")),
        *(pytest.param("ltx23_wide", f, marks=SLOW) for f in ("int8_convrot", "fp8_e4m3fn")),
    ],
)
def test_a_quantised_file_runs_compiled_with_and_without_a_lora(
    host: Host, shared: Lab, kind: str, form: str
) -> None:
    model = transformers.load_quantised(kind, form)
    run = AvRun(host, shared, kind, model)
    run.sample()
    lora = "blocks.1.mlp.fc2" if kind.startswith("h3") else "transformer_blocks.1.ff.net.2"
    tolerance = 4 * QUANTISED
    run.check(4, 6, 2, tolerance=tolerance)
    run.check(8, 8, 7, sounds=17, tokens=40, tolerance=tolerance)
    weight = run.root.get_submodule(lora).weight
    clone = run.model.clone()
    change = 0.3 * torch.randn(weight.shape, generator=generator(9))
    assert clone.add_patches({f"diffusion_model.{lora}.weight": ("diff", (change,))}, 0.5)
    plain = run.sample(4, 6, 2)[0]
    run.check(4, 6, 2, model=clone, tolerance=tolerance)
    assert relative(run.sample(4, 6, 2, model=clone)[0], plain) > 1e-3


@SLOW
@pytest.mark.parametrize("kind", ["ltx23", "h3", "h3_curves"])
def test_a_model_in_bfloat16_is_as_near_to_float32_as_eager(
    host: Host, shared: Lab, kind: str
) -> None:
    run = AvRun(host, shared, kind, transformers.load(kind, dtype=torch.bfloat16))
    run.sample()
    run.check(4, 6, 2, tolerance=3e-2)
    run.check(8, 6, 7, sounds=17, tokens=40, tolerance=3e-2)


# --- what a key and a comparison know -------------------------------------------------------------


def test_what_ltx_keeps_of_its_timesteps_is_in_the_key(
    ltx: AvRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is a method of an object that the block is given."""
    if ltx.kind == "ltxv":
        pytest.skip("has plain tensors")
    from comfy.ldm.lightricks.av_model import CompressedTimestep

    def key() -> str:
        plan = plan_model(ltx.root)
        assert isinstance(plan, Plan)
        place = plan.places[0]
        described = describe_place(place, plan, dtype=torch.float32, device="cpu")
        return repr(sorted(described.sources.items()))

    before = key()

    def expand_for_computation(self: Any, *args: Any, **named: Any) -> Any:
        return ()

    monkeypatch.setattr(CompressedTimestep, "expand_for_computation", expand_for_computation)
    assert key() != before


@pytest.mark.parametrize("cut", [True, False])
def test_long_calls_are_compared_on_a_part_of_their_tokens(
    h3: AvRun, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """A whole block of the host's beside the graph's may not fit a small card; all kinds of tokens
    are compared.
    """
    if cut:
        monkeypatch.setattr(verifier, "MAX_COMPARED", 20_000)
    seen: set[tuple[int, int]] = set()
    sample = verifier.Verifier.sample

    def noted(each: Any, inputs: Any, elements: int) -> Any:
        found = sample(each, inputs, elements)
        x, modulation, *_ = found.inputs
        seen.add((x.shape[0], modulation.shape[1]))
        return found

    monkeypatch.setattr(verifier.Verifier, "sample", noted)
    monkeypatch.setattr(verifier.Verifier, "covers", lambda *_: False)
    h3.check(8, 8, 7)
    [(tokens, kinds)] = seen
    everything = 7 * 16 + 2 * 8 + 13
    assert kinds == 3 and (tokens < everything if cut else tokens == everything)


def test_a_call_with_guides_is_compared_on_a_part_of_its_tokens_without_them(
    ltx: AvRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask is of all tokens."""
    monkeypatch.setattr(verifier, "MAX_COMPARED", 2_000)
    monkeypatch.setattr(verifier.Verifier, "covers", lambda *_: False)
    ltx.check(4, 5, 4, change=guided(0.7), cfg=3.0)
