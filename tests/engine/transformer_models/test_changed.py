"""What other nodes change of a transformer is obeyed, by compiled blocks wherever these can."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from warmgraph_backends.host_api.attention import replaceable
from warmgraph_backends.runtime.wiring import Wiring
from warmgraph_tools.inprocess import Host

from ..lab import TOLERANCE, Lab, assert_same_calls, relative
from ..transformer_runs import Run

ATTENTION = "optimized_attention_override"
# Whose blocks the host lets nobody patch.
UNPATCHED = ("sd3",)
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


# --- attention ------------------------------------------------------------------------------------


def test_attention_is_what_the_options_say_once_for_each_and_stays_compiled(run: Run) -> None:
    """As nodes for SageAttention do it; the result is the override's, not the host's."""
    from comfy.ldm.modules.attention import attention_pytorch

    calls: list[torch.Tensor] = []

    def halved(function: Any, *args: Any, **kwargs: Any) -> Any:
        result = attention_pytorch(*args, **kwargs)
        calls.append(result)
        return 0.5 * result

    plain = run.sample()
    clone = run.model.clone()
    clone.model_options["transformer_options"][ATTENTION] = halved
    run.check(model=clone)
    # Once by eager's call, which the probe holds beside ours, and once by ours, in its order.
    assert len(calls) == 2 * run.expected.attentions * len(run.probe.calls)
    assert_same_calls(calls, len(run.probe.calls))
    assert not torch.equal(run.sample(model=clone), plain)
    run.check()


def test_an_attention_is_asked_once_where_a_graph_is_compared_with_the_host(run: Run) -> None:
    """In the first calls of each model: code that counts its calls does something else next."""
    from comfy.ldm.modules.attention import attention_pytorch

    calls: list[torch.Tensor] = []

    def counting(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(attention_pytorch(*args, **kwargs))
        return calls[-1] * (1 + len(calls) % run.expected.attentions)

    again = Run(run.host, run.lab, run.kind)
    clone = again.model.clone()
    clone.model_options["transformer_options"][ATTENTION] = counting
    again.check(model=clone)
    assert len(calls) == 2 * run.expected.attentions * len(again.probe.calls)
    assert_same_calls(calls, len(again.probe.calls))


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
    again.check(
        12, 10, 2, 5
    )  # each kind is compared with this model, and asks the host's once more
    calls.clear()
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


# --- blocks ---------------------------------------------------------------------------------------


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


# --- weights --------------------------------------------------------------------------------------


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
