"""DeepCache under what other nodes put on a model or its conditioning.

What acts in blocks by itself equals the reference bit for bit. What draws random numbers or keeps
something of an earlier call does so only where its draws and its memory are made the same in both,
since outer blocks alone call it less often.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_tools import checkpoints
from warmgraph_tools.inprocess import Host

from .cached import STEPS, Pair, Patch, Reference, cache_of, cached, evaluations

#: The models, and where their UNets are cut: outer blocks with attention at both ends of one.
pytestmark = pytest.mark.usefixtures("one_thread")

CUTS = [("narrow15", 0), ("narrowxl", 3)]
#: Models whose levels are wide enough for an adapter's features.
ADAPTERS = ("narrowt2i15", "narrowt2ixl")
CALLS = {"full": 3, "shallow": 4}


@pytest.fixture(scope="module")
def pairs(host: Host) -> dict[str, Pair]:
    return {kind: Pair(host, kind) for kind in (*dict(CUTS), *ADAPTERS)}


@pytest.fixture
def xl(pairs: dict[str, Pair]) -> Pair:
    return pairs["narrowxl"]


@pytest.fixture
def sd15(pairs: dict[str, Pair]) -> Pair:
    return pairs["narrow15"]


def changed(act: Callable[[Any], None]) -> Patch:
    """The patch that does something to a clone."""

    def patch(model: Any) -> Any:
        clone = model.clone()
        act(clone)
        return clone

    return patch


# --- patches of blocks ----------------------------------------------------------------------------


def _attention(name: str) -> Patch:
    """Like IPAdapter's first kind: more tokens to look at."""

    def more(q: Any, k: Any, v: Any, extra: Any) -> Any:
        gain = 1 + 0.1 * extra["transformer_index"]
        return q, torch.cat([k, k[:, :5]], 1), torch.cat([v, -gain * v[:, :5]], 1)

    return changed(lambda model: model.set_model_patch(more, name))


def _scaled(name: str) -> Patch:
    """By block, so that one in another's place shows."""

    def scale(x: torch.Tensor, extra: Any) -> torch.Tensor:
        return x * (1.05 + 0.02 * extra["transformer_index"] + 0.1 * extra["block_index"])

    return changed(lambda model: model.set_model_patch(scale, name))


def _replaced(name: str) -> Patch:
    """Like IPAdapter's second kind: attention that fades over the run, in outer and deep blocks."""

    def attention(q: Any, k: Any, v: Any, extra: Any) -> torch.Tensor:
        from comfy.ldm.modules.attention import optimized_attention

        gain = 0.5 + extra["sigmas"][0] / 30
        return gain * optimized_attention(q, k, v, extra["n_heads"])

    def act(model: Any) -> None:
        replace = getattr(model, f"set_model_{name}_replace")
        places = [("input", n) for n in range(6)] + [("output", n) for n in range(6)]
        for block, number in [*places, ("middle", 1)]:
            replace(attention, block, number)

    return changed(act)


def _blocks(name: str) -> Patch:
    def one(h: torch.Tensor, options: Any) -> torch.Tensor:
        return h * (1.0 + 0.03 * options["block"][1])

    def two(h: torch.Tensor, skip: torch.Tensor, options: Any) -> Any:
        h[:, ::2] *= 1.0 + 0.03 * options["block"][1]  # in place, as FreeU
        return h, skip * 0.9

    def middle(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "h": given["h"] * 1.5 + 0.1}

    def embedding(emb: torch.Tensor, channels: int, options: Any) -> torch.Tensor:
        return emb * 1.2

    patch = {
        "output_block_patch": two,
        "middle_block_after_patch": middle,
        "emb_patch": embedding,
    }.get(name, one)
    return changed(lambda model: model.set_model_patch(patch, name))


def _layers(model: Any) -> None:
    """Some packs handle layers of a class by themselves."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock

    def handle(layer: Any, x: Any, emb: Any, *others: Any) -> Any:
        return layer(x, emb * 1.1)

    model.set_model_patch((ResBlock, handle), "forward_timestep_embed_patch")


def _override(model: Any) -> None:
    def attention(original: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        return original(q, k, v * 1.3, *rest, **named)

    model.model_options["transformer_options"]["optimized_attention_override"] = attention


BLOCKS: dict[str, Patch] = {
    **{name: _attention(name) for name in ("attn1_patch", "attn2_patch")},
    **{name: _scaled(name) for name in ("attn1_output_patch", "middle_patch")},
    "attn2_output_patch": _scaled("attn2_output_patch"),
    **{f"{name}_replace": _replaced(name) for name in ("attn1", "attn2")},
    **{
        name: _blocks(name)
        for name in (
            "input_block_patch",
            "input_block_patch_after_skip",
            "output_block_patch",
            "middle_block_after_patch",
            "emb_patch",
        )
    },
    "forward_timestep_embed_patch": changed(_layers),
    "optimized_attention_override": changed(_override),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("kind", "branch"), CUTS)
def test_patches_of_blocks(pairs: dict[str, Pair], kind: str, branch: int, name: str) -> None:
    assert pairs[kind].check(BLOCKS[name], branch=branch, width=72) == CALLS


def test_several_patches_together(xl: Pair) -> None:
    def patch(model: Any) -> Any:
        for each in BLOCKS.values():
            model = each(model)
        return model

    assert xl.check(patch, branch=2) == CALLS


# --- nodes of the host ----------------------------------------------------------------------------

NODES: dict[str, dict[str, Any]] = {
    "FreeU": {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2},
    "FreeU_V2": {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2},
    "NAGuidance": {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5},
    "RescaleCFG": {"multiplier": 0.7},
    "Mahiro": {},
    "APG": {"eta": 0.5, "norm_threshold": 5.0, "momentum": 0.3},
    "CFGZeroStar": {},
    "TCFG": {},
    "FreSca": {"scale_low": 1.0, "scale_high": 1.5, "freq_cutoff": 2},
    "Epsilon Scaling": {"scaling_factor": 1.02},
    "PerturbedAttentionGuidance": {"scale": 2.0},
    "UNetCrossAttentionMultiply": {"q": 1.2, "k": 0.8, "v": 1.1, "out": 1.0},
}


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize(("kind", "branch"), CUTS)
def test_nodes_of_the_host(
    pairs: dict[str, Pair], kind: str, branch: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs[kind]
    # FreeU looks for widths of 4 and 2 times the model's; a narrow model's are all 64.
    config = pair.model.model.model_config.unet_config
    monkeypatch.setitem(config, "model_channels", 16 if name == "FreeU" else 32)
    calls = 2 if name == "PerturbedAttentionGuidance" else 1
    counts = pair.check(pair.patch(name, **NODES[name]), branch=branch, height=72)
    assert counts == {sort: calls * count for sort, count in CALLS.items()}


@pytest.mark.parametrize("words", [4, 400])
def test_perturbed_attention_never_meets_the_plain_calls_feature(xl: Pair, words: int) -> None:
    """With cond and uncond apart, both calls of the positive conditioning have one form."""
    guidance = xl.patch("PerturbedAttentionGuidance", scale=3.0)
    counts = xl.check(guidance, positive=xl.prompt("cat " * words), branch=1)
    assert counts == {sort: (2 if words == 4 else 3) * count for sort, count in CALLS.items()}


def test_perpendicular_negative(xl: Pair) -> None:
    patch = xl.patch("PerpNeg", empty_conditioning=xl.prompt(""), neg_scale=0.7)
    assert xl.check(patch) == {"full": 6, "shallow": 8}


@pytest.mark.parametrize("words", [4, 400])
def test_self_attention_guidance(sd15: Pair, words: int) -> None:
    """It blurs where the middle block's attention is: in shallow steps, that of the last full one.

    The reference computes the middle block at every step, so its recording is kept out there.
    """
    patch = sd15.patch("SelfAttentionGuidance", scale=0.8, blur_sigma=2.0)
    positive = sd15.prompt("cat " * words)
    reference = Reference()

    def at_full_steps(model: Any) -> Any:
        place = ("middle", 0, 0)
        record = model.model_options["transformer_options"]["patches_replace"]["attn1"][place]

        def attention(q: Any, k: Any, v: Any, extra: Any) -> Any:
            return record(q, k, v, extra) if reference.is_full else q

        clone = model.clone()
        clone.set_model_attn1_replace(attention, *place)
        return clone

    expected = sd15.sample(at_full_steps(patch(reference.attach(sd15.model))), positive=positive)
    plain = sd15.sample(patch(sd15.model), positive=positive)
    assert not torch.equal(expected, plain)
    for ours in (patch(cached(sd15.model)), cached(patch(sd15.model))):
        assert torch.equal(sd15.sample(ours, positive=positive), expected)
        assert evaluations(ours) == reference.counts
    always = cached(patch(sd15.model), interval=1)
    assert torch.equal(sd15.sample(always, positive=positive), plain)


@pytest.mark.parametrize("after_skip", [True, False])
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("branch", [0, 2])
def test_deep_shrink(xl: Pair, block: int, after_skip: bool, branch: int) -> None:
    """It ends in the middle of an interval."""
    patch = xl.patch(
        "PatchModelAddDownscale",
        block_number=block,
        downscale_factor=1.7,
        start_percent=0.0,
        end_percent=0.6,
        downscale_after_skip=after_skip,
        downscale_method="bicubic",
        upscale_method="bilinear",
    )
    assert xl.check(patch, branch=branch, width=104, height=72) == CALLS


def test_differential_diffusion(xl: Pair) -> None:
    mask = torch.linspace(0, 1, 72).expand(1, 64, 72)
    latent = {"samples": torch.full((1, 4, 8, 9), 0.3)}
    latent = xl.node("SetLatentNoiseMask", samples=latent, mask=mask)
    assert xl.check(xl.patch("DifferentialDiffusion"), latent=latent, denoise=0.8) == CALLS


def test_hyper_tile_of_one_size(sd15: Pair) -> None:
    tile = sd15.patch("HyperTile", tile_size=32, swap_size=1, max_depth=1, scale_depth=False)
    assert sd15.check(tile, width=128, height=128, steps=4, full={0, 3}) == {
        "full": 2,
        "shallow": 2,
    }


def _evaluation_counted(count: Callable[[], None]) -> Patch:
    from comfy.patcher_extension import WrappersMP

    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        count()
        return executor(*args, **kwargs)

    return changed(
        lambda model: model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "tests.count", around)
    )


def test_hyper_tile_with_the_same_draws(sd15: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = 0
    drawn: set[int] = set()

    def count() -> None:
        nonlocal evaluation
        evaluation += 1

    def draw(low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        drawn.add(evaluation % high)
        return torch.tensor([evaluation % high])

    monkeypatch.setattr(sd15.module_of("HyperTile"), "randint", draw)
    tile = sd15.patch("HyperTile", tile_size=32, swap_size=3, max_depth=1, scale_depth=False)

    def sample(model: Any, **sampling: Any) -> torch.Tensor:
        nonlocal evaluation
        evaluation = 0
        counted = _evaluation_counted(count)(model)
        return sd15.sample(counted, width=128, height=128, steps=4, **sampling)

    assert sd15.check(tile, sample=sample, full={0, 3}) == {"full": 2, "shallow": 2}
    assert len(drawn) == 2


def test_merged_tokens_with_the_same_draws(sd15: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module = "bipartite_soft_matching_random2d", sd15.module_of("TomePatchModel")
    host = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: host(*args[:6], no_rand=True))
    merge = sd15.patch("TomePatchModel", ratio=0.5)
    for branch in (0, 1):
        assert sd15.check(merge, branch=branch, width=72) == CALLS


@pytest.mark.parametrize("name", ["HyperTile", "TomePatchModel"])
def test_what_draws_random_numbers_is_no_reason_to_step_aside(sd15: Pair, name: str) -> None:
    """Outer blocks draw what they like; the image is neither the plain nor the reference's."""
    widgets: dict[str, Any] = {
        "HyperTile": {"tile_size": 32, "swap_size": 3, "max_depth": 0, "scale_depth": False},
        "TomePatchModel": {"ratio": 0.5},
    }
    ours = cached(sd15.patch(name, **widgets[name])(sd15.model))
    sd15.sample(ours, width=128, height=128, steps=4)
    assert evaluations(ours) == {"full": 2, "shallow": 2}


def test_patches_see_each_block_once_a_call_but_for_one_check(xl: Pair) -> None:
    """Patches that count live on it. The first full call of a model that has them is checked by one
    more call of the outer blocks; no later one is.
    """
    seen: list[tuple[Any, float]] = []

    def note(h: torch.Tensor, options: Any) -> torch.Tensor:
        seen.append((options["block"], float(options["sigmas"][0])))
        return h

    ours = cached(xl.model)
    ours.set_model_input_block_patch(note)
    blocks = len(xl.unet.input_blocks)
    for check in (1, 0):
        seen.clear()
        xl.sample(ours)
        assert len(seen) == len(set(seen)) + check == 3 * blocks + 4 + check


# --- weights --------------------------------------------------------------------------------------


def _lora(pair: Pair, strength: float) -> Patch:
    name = pair.host.model_file("lora", base="narrowxl")
    return pair.patch("LoraLoaderModelOnly", lora_name=name, strength_model=strength)


@pytest.mark.parametrize("branch", [0, 3])
def test_loras(xl: Pair, branch: int) -> None:
    def both(model: Any) -> Any:
        return _lora(xl, -0.4)(_lora(xl, 1.0)(model))

    for patch in (_lora(xl, 0.8), both):
        assert xl.check(patch, branch=branch) == CALLS


def test_a_lora_on_one_of_two_clones(xl: Pair) -> None:
    """They share a DeepCache; their weights take turns."""
    plain = cached(xl.model)
    changed = _lora(xl, 1.0)(plain)
    expected = [
        xl.sample(model)
        for model in (Reference().attach(xl.model), _lora(xl, 1.0)(Reference().attach(xl.model)))
    ]
    for _ in range(2):
        for model, image in zip((plain, changed), expected, strict=True):
            assert torch.equal(xl.sample(model), image)


def _hooks(pair: Pair, *keyframes: tuple[float, float]) -> Any:
    """A LoRA's hook, with (strength, start) of each keyframe."""
    name = pair.host.model_file("lora", base="narrowxl")
    hooks = pair.node("CreateHookLoraModelOnly", lora_name=name, strength_model=1.0)
    group = None
    for strength, start in keyframes:
        given = {} if group is None else {"prev_hook_kf": group}
        group = pair.node(
            "CreateHookKeyframe", strength_mult=strength, start_percent=start, **given
        )
    return pair.node("SetHookKeyframes", hooks=hooks, hook_kf=group)


def _hooked(pair: Pair, conditioning: Any, hooks: Any, **given: Any) -> Any:
    return pair.node(
        "ConditioningSetProperties",
        cond_NEW=conditioning,
        strength=1.0,
        set_cond_area="default",
        hooks=hooks,
        **given,
    )


def _with_hooks(pair: Pair, *keyframes: tuple[float, float], both: bool = False) -> Any:
    """`sample(model)` under a hook of its own; the host's hooks remember the run before."""

    def sample(model: Any, **sampling: Any) -> torch.Tensor:
        hooks = _hooks(pair, *keyframes)
        positive = _hooked(pair, pair.positive, hooks)
        negative = _hooked(pair, pair.negative, hooks) if both else pair.negative
        return pair.sample(model, positive=positive, negative=negative, **sampling)

    return sample


@pytest.mark.parametrize("branch", [0, 3])
@pytest.mark.parametrize("both", [True, False])
def test_hooked_loras(xl: Pair, both: bool, branch: int) -> None:
    """On one conditioning only, calls are of two groups with weights of their own."""
    sample = _with_hooks(xl, both=both)
    counts = xl.check(sample=sample, branch=branch)
    assert counts == {sort: (1 if both else 2) * count for sort, count in CALLS.items()}
    assert not torch.equal(sample(xl.model), xl.sample(xl.model))


def _step_of(pair: Pair, percent: float, steps: int) -> int:
    """The first step of a run that is past a part of it."""
    sampling = pair.model.model.model_sampling
    sigma = sampling.percent_to_sigma(percent)
    sigmas = pair.node(
        "BasicScheduler", model=pair.model, scheduler="normal", steps=steps, denoise=1.0
    )
    return next(n for n, each in enumerate(sigmas.tolist()) if each <= sigma)


def test_weights_that_a_hook_changes_in_the_run_take_a_full_step(xl: Pair) -> None:
    """A keyframe changes what all blocks compute, as another patch would."""
    change = _step_of(xl, 0.5, 10)
    assert change % 4 and change < 8
    sample = functools.partial(_with_hooks(xl, (0.0, 0.0), (1.0, 0.5), both=True), steps=10)
    xl.check(sample=sample, full={0, 4, 8, change}, options={"interval": 4})


def test_patches_that_a_hook_brings_to_one_conditioning(xl: Pair) -> None:
    import comfy.hooks

    def strong(q: Any, k: Any, v: Any, extra: Any) -> Any:
        return q, k, v * 1.5

    hook = comfy.hooks.TransformerOptionsHook(
        {"patches": {"attn2_patch": [strong]}}, comfy.hooks.EnumHookScope.HookedOnly
    )
    group = comfy.hooks.HookGroup()
    group.add(hook)
    positive = _hooked(xl, xl.positive, group)
    counts = xl.check(positive=positive, branch=3)
    assert counts == {"full": 6, "shallow": 8}


def test_a_hypernetwork(sd15: Pair) -> None:
    folder = Path(sd15.host.folder_paths.get_folder_paths("hypernetworks")[0])
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(4)
    sides = []
    for _ in "kv":
        weights = {}
        for name, shape in {"linear1": (128, 64), "linear2": (64, 128)}.items():
            weights[f"{name}.weight"] = torch.randn(shape, generator=draw) / 8
            weights[f"{name}.bias"] = torch.zeros(shape[0])
        sides.append(weights)
    table = {"activation_func": "swish", "is_layer_norm": False, 64: sides}
    torch.save(table, folder / "outer.pt")
    load = sd15.patch("HypernetworkLoader", hypernetwork_name="outer.pt", strength=0.7)
    assert sd15.check(load) == CALLS


# --- control --------------------------------------------------------------------------------------


def _controlled(pair: Pair, *nets: tuple[Any, dict[str, Any]]) -> dict[str, Any]:
    """Both prompts under a chain of controls."""
    image = torch.rand(1, 72, 104, 3, generator=torch.Generator().manual_seed(0))
    conditioning = (pair.positive, pair.negative)
    for net, options in nets:
        conditioning = pair.host.node(
            "ControlNetApplyAdvanced",
            positive=conditioning[0],
            negative=conditioning[1],
            control_net=net,
            image=image,
            **{"strength": 0.8, "start_percent": 0.0, "end_percent": 1.0, **options},
        )
    size = {"width": 104, "height": 72}
    return {"positive": conditioning[0], "negative": conditioning[1], **size}


def _net(pair: Pair, kind: str, *, file: str = "controlnet") -> Any:
    name = checkpoints.ensure(pair.host.base / "models", file, base=kind).name
    return pair.node("ControlNetLoader", control_net_name=name)


@pytest.mark.parametrize(("kind", "branch"), [("narrow15", 1), ("narrowxl", 0), ("narrowxl", 4)])
def test_control_reaches_its_own_blocks(pairs: dict[str, Pair], kind: str, branch: int) -> None:
    """At branch 4 the middle block's residual would fit the feature, too, which has it already."""
    pair = pairs[kind]
    net = _net(pair, kind)
    plain = pair.sample(pair.model, width=104, height=72)
    for options in ({}, {"strength": 0.3}):
        sampling = _controlled(pair, (net, options))
        assert not torch.equal(pair.sample(pair.model, **sampling), plain)
        assert pair.check(branch=branch, **sampling) == CALLS


def test_two_controls(xl: Pair) -> None:
    net = _net(xl, "narrowxl")
    sampling = _controlled(xl, (net, {"strength": 0.5}), (net, {"strength": 0.2}))
    assert xl.check(branch=1, **sampling) == CALLS


@pytest.mark.parametrize(
    ("start", "end"),
    [
        pytest.param(0.3, 1.0, id="late"),
        pytest.param(0.0, 0.6, id="early"),
        pytest.param(0.3, 0.7, id="between"),
    ],
)
def test_control_that_comes_or_goes_in_the_run_takes_full_calls(
    xl: Pair, start: float, end: float
) -> None:
    sampling = _controlled(xl, (_net(xl, "narrowxl"), {"start_percent": start, "end_percent": end}))
    edges = {_step_of(xl, part, 12) for part in (start, end) if 0 < part < 1}
    assert not edges & {0, 5, 10}
    counts = xl.check(
        branch=1, steps=12, full={0, 5, 10} | edges, options={"interval": 5}, **sampling
    )
    assert counts["full"] == 3 + len(edges)


def test_control_that_changes_its_strength_acts_in_the_outer_blocks_at_once(xl: Pair) -> None:
    """Of the same blocks' residuals nothing tells apart: in the deep ones the change is felt with
    the next full step.
    """
    net = _net(xl, "narrowxl")
    sampling = _controlled(
        xl,
        (net, {"strength": 1.0, "end_percent": 0.5}),
        (net, {"strength": 0.2, "start_percent": 0.5}),
    )
    assert xl.check(steps=10, full={0, 4, 8}, options={"interval": 4}, **sampling)["full"] == 3


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("branch", [0, 2])
def test_a_t2i_adapter(pairs: dict[str, Pair], kind: str, branch: int) -> None:
    pair = pairs[kind]
    sampling = _controlled(pair, (_net(pair, kind, file="t2i"), {}))
    bare = {name: sampling[name] for name in ("width", "height")}
    assert not torch.equal(pair.sample(pair.model, **sampling), pair.sample(pair.model, **bare))
    assert pair.check(branch=branch, **sampling) == CALLS


def test_gligen_runs_whole_at_every_step(xl: Pair) -> None:
    """The host makes its patch anew for each evaluation: what it does then nobody can tell."""
    import comfy.gligen

    draw = torch.Generator().manual_seed(2)
    parts = {
        f"{name}.fuser": comfy.gligen.GatedSelfAttentionDense(64, 64, 1, 64)
        for name, module in xl.unet.named_modules()
        if type(module).__name__ == "BasicTransformerBlock"
    }
    weights = {
        f"{name}.{key}": torch.randn(value.shape, generator=draw) / 8
        for name, part in {**parts, "position_net": comfy.gligen.PositionNet(64, 64)}.items()
        for key, value in part.state_dict().items()
    }
    folder = Path(xl.host.folder_paths.get_folder_paths("gligen")[0])
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weights, folder / "outer.pt")
    positive = xl.node(
        "GLIGENTextBoxApply",
        conditioning_to=xl.positive,
        clip=xl.clip,
        gligen_textbox_model=xl.node("GLIGENLoader", gligen_name="outer.pt"),
        text="a dog",
        width=32,
        height=32,
        x=16,
        y=16,
    )
    plain = xl.sample(xl.model, positive=positive)
    assert not torch.equal(plain, xl.sample(xl.model))
    ours = cached(xl.model, branch=3)
    assert torch.equal(xl.sample(ours, positive=positive), plain)
    counts = evaluations(ours)
    assert counts["full"] > STEPS and counts["shallow"] <= 4, "the other conditioning is as ever"


# --- wrappers of others ---------------------------------------------------------------------------


def _wrapped(kind: str) -> Patch:
    def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if kind in ("apply_model", "diffusion_model"):
            args = (args[0] * 1.02, *args[1:])
        result = executor(*args, **kwargs)
        return [each * 0.99 for each in result] if isinstance(result, list) else result * 0.99

    return changed(lambda model: model.add_wrapper_with_key(kind, "another", around))


@pytest.mark.parametrize(
    "kind", ["predict_noise", "calc_cond_batch", "apply_model", "diffusion_model"]
)
def test_wrappers_of_the_host(xl: Pair, kind: str) -> None:
    assert xl.check(_wrapped(kind), branch=1) == CALLS


def _function(
    wrapper: Callable[[Callable[..., torch.Tensor], dict[str, Any]], torch.Tensor],
) -> Patch:
    return changed(lambda model: model.set_model_unet_function_wrapper(wrapper))


def test_a_wrapper_of_the_models_function(xl: Pair) -> None:
    def scaled(apply: Any, given: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = apply(given["input"] * 1.02, given["timestep"], **given["c"])
        return result * 0.99

    assert xl.check(_function(scaled)) == CALLS


def _behind(patch: Patch, sample: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A way to sample under a patch that leaves a plain image as it is."""
    return lambda model, **sampling: sample(patch(model), **sampling)


def _sliced(value: Any, rows: slice, batch: int) -> Any:
    if isinstance(value, torch.Tensor) and value.shape[0] == batch:
        return value[rows]
    return value


def test_a_wrapper_that_runs_each_row_of_a_batch_by_itself(xl: Pair) -> None:
    """Its calls differ in nothing but their place in the evaluation."""

    def rows(apply: Any, given: dict[str, Any]) -> torch.Tensor:
        x, t = given["input"], given["timestep"]
        return torch.cat(
            [
                apply(
                    x[n : n + 1],
                    t[n : n + 1],
                    **{k: _sliced(v, slice(n, n + 1), len(x)) for k, v in given["c"].items()},
                )
                for n in range(len(x))
            ]
        )

    sample = _behind(_function(rows), xl.sample)  # it changes an image by rounding, if at all
    assert xl.check(sample=sample, width=72) == {"full": 6, "shallow": 8}


def test_a_wrapper_that_runs_tiles(xl: Pair) -> None:
    """As nodes for images larger than memory do."""

    def tiles(apply: Any, given: dict[str, Any]) -> torch.Tensor:
        x, t = given["input"], given["timestep"]
        return torch.cat(
            [apply(tile.contiguous(), t, **given["c"]) for tile in x.chunk(3, dim=3)], dim=3
        )

    assert xl.check(_function(tiles), width=192) == {"full": 9, "shallow": 12}


@pytest.mark.parametrize("schedule", ["standard_static", "looped_uniform"])
@pytest.mark.parametrize("causal", [True, False])
def test_context_windows(xl: Pair, schedule: str, causal: bool) -> None:
    """Windows over a batch of images: several calls of one form in each evaluation. A schedule may
    move them from step to step.
    """
    windows = xl.patch(
        "ContextWindowsManual",
        context_length=3,
        context_overlap=1,
        context_schedule=schedule,
        context_stride=1,
        closed_loop=False,
        fuse_method="pyramid",
        dim=0,
        freenoise=False,
        cond_retain_index_list="",
        split_conds_to_windows=False,
        latent_retain_index_list="",
        causal_window_fix=causal,
    )
    xl.check(sample=_behind(windows, xl.sample), batch=7)


# --- modules that others change -------------------------------------------------------------------


class Scaled(torch.nn.Module):
    """A layer that others hang behind a block's own, as motion modules are."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


@pytest.mark.parametrize("branch", [0, 1, 3])
def test_layers_injected_for_the_run(xl: Pair, branch: int) -> None:
    from comfy.patcher_extension import PatcherInjection

    def blocks(patcher: Any) -> list[Any]:
        unet = patcher.model.diffusion_model
        return [*unet.input_blocks[1:], *unet.output_blocks]

    def inject(patcher: Any) -> None:
        for number, block in enumerate(blocks(patcher)):
            block.append(Scaled(1.0 + 0.01 * number))

    def eject(patcher: Any) -> None:
        for block in blocks(patcher):
            if isinstance(block[-1], Scaled):
                block.pop(len(block) - 1)

    patch = changed(lambda model: model.set_injections("tests", [PatcherInjection(inject, eject)]))
    before = list(xl.unet.named_modules())
    try:
        assert xl.check(patch, branch=branch) == CALLS
    finally:
        xl.host.unload()
    assert list(xl.unet.named_modules()) == before


def _weaker(module: Any) -> Any:
    twin = copy.deepcopy(module)
    for parameter in twin.parameters():
        parameter.mul_(0.8)
    return twin


_TRANSFORMER = "output_blocks.2.1.transformer_blocks.0.attn2"
OBJECTS = [
    # Within blocks that the two networks share with the model.
    *((0, "middle_block.0"), (0, _TRANSFORMER), (5, "output_blocks.4.0"), (5, _TRANSFORMER)),
    # What they hold themselves; the layers of the block before the cut are such, too.
    *((5, name) for name in ("middle_block.0", "middle_block", "output_blocks.5")),
    *(
        (0, name)
        for name in (
            *("input_blocks.0", "middle_block", "output_blocks.2", "output_blocks.4"),
            *("output_blocks.4.0", "output_blocks.5", "time_embed", "label_emb", "out"),
        )
    ),
]


@pytest.mark.parametrize(("branch", "name"), OBJECTS)
def test_replaced_objects(xl: Pair, name: str, branch: int) -> None:
    """They are in the model from its loading on, which comes after all nodes, until another clone
    is loaded.
    """
    place = f"diffusion_model.{name}"
    twin = _weaker(xl.model.get_model_object(place))
    patch = changed(lambda model: model.add_object_patch(place, twin))
    reference = Reference(branch=branch)
    try:
        ours = [cached(patch(xl.model), branch=branch), patch(cached(xl.model, branch=branch))]
        expected = xl.sample(patch(reference.attach(xl.model)))
        ours += [cached(patch(xl.model), branch=branch)]  # it is in the model now
        plain = xl.sample(Reference(branch=branch).attach(xl.model))
        assert not torch.equal(expected, plain)
        ours_without = cached(xl.model, branch=branch)
        for model in ours:
            assert torch.equal(xl.sample(model), expected)
            assert evaluations(model) == CALLS
            assert torch.equal(xl.sample(ours_without), plain)
    finally:
        xl.host.unload()


@pytest.mark.parametrize("name", ["forward", "_forward"])
def test_a_replaced_forward_of_the_unet_runs(xl: Pair, name: str) -> None:
    """What it computes nobody knows: it runs at every step."""
    host = getattr(xl.unet, name)

    def scaled(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = host(x * 1.05, *args, **kwargs)
        return result

    patch = changed(lambda model: model.add_object_patch(f"diffusion_model.{name}", scaled))
    ours = cached(patch(xl.model))
    try:
        found = xl.sample(ours)
        expected = xl.sample(patch(xl.model))
        assert not torch.equal(expected, xl.sample(xl.model))
        if name == "_forward":
            assert torch.equal(found, expected)
        else:  # it calls the host's own, within which the calls are DeepCache's
            assert torch.equal(found, xl.sample(patch(Reference().attach(xl.model))))
        # The host puts the method back as an attribute of the instance.
        found, expected = (xl.sample(m) for m in (cached(xl.model), Reference().attach(xl.model)))
        assert torch.equal(found, expected)
    finally:
        xl.host.unload()
        xl.unet.__dict__.pop(name, None)


def test_another_patch_of_a_kind_is_checked_by_itself(xl: Pair) -> None:
    """One that outer blocks cannot follow is noticed, whatever was there before it."""
    calls = 0

    def fair(h: torch.Tensor, options: Any) -> torch.Tensor:
        return h * 1.1

    def unfair(h: torch.Tensor, options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return h * (1 + 1e-3 * calls)

    ours = cached(xl.model)
    for patch in (fair, unfair, fair):
        model = ours.clone()
        model.set_model_input_block_patch(patch)
        xl.sample(model)
        assert (cache_of(model).problem is not None) == (patch is unfair)
