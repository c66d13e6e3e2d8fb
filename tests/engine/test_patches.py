"""What other nodes patch runs the host's own code and is named; all around it stays compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .others import Counting
from .rows import some_rows
from .subject import Subject, reasons

BLOCK = "diffusion_model.input_blocks.3.1.transformer_blocks.0"
RESIDUAL = "diffusion_model.middle_block.0"


@pytest.fixture(scope="module")
def xl(lab: Lab, host: Host) -> Subject:
    return Subject(lab, host, "narrowxl")


def node(xl: Subject, class_type: str, **widgets: Any) -> Any:
    """The patch that a core node with a MODEL input and output makes."""
    return lambda model: xl.host.node(class_type, model=model, **widgets)[0]


def object_patch(name: str, make: Any) -> Any:
    """The patch that puts `make(the host's object)` in place of an object of the model."""

    def patch(model: Any) -> Any:
        clone = model.clone()
        clone.add_object_patch(name, make(model.get_model_object(name)))
        return clone

    return patch


# --- patches between regions ---------------------------------------------------------------------


@pytest.mark.parametrize("class_type", some_rows(["FreeU", "FreeU_V2"], ["FreeU_V2"]))
def test_freeu_leaves_everything_compiled(
    xl: Subject, class_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FreeU looks for widths of 4 and 2 times the model's; the narrow model's are all 64.
    monkeypatch.setitem(xl.model.model.model_config.unet_config, "model_channels", 16)
    assert reasons(xl.check(node(xl, class_type, b1=1.3, b2=1.4, s1=0.9, s2=0.2))) == {}


@pytest.mark.parametrize("after_skip", some_rows([True, False], [True]))
def test_deep_shrink_leaves_everything_compiled(xl: Subject, after_skip: bool) -> None:
    shrink = node(
        xl,
        "PatchModelAddDownscale",
        block_number=3,
        downscale_factor=1.7,
        start_percent=0.0,
        end_percent=0.6,  # the last of three steps runs at full size
        downscale_after_skip=after_skip,
        downscale_method="bicubic",
        upscale_method="bilinear",
    )
    assert reasons(xl.check(shrink, width=104, height=72, steps=3)) == {}


def test_block_and_embedding_patches_leave_everything_compiled(xl: Subject) -> None:
    def patch(model: Any) -> Any:
        clone = model.clone()
        clone.set_model_input_block_patch(lambda h, options: h * 1.1)
        clone.set_model_output_block_patch(lambda h, skip, options: (h[:, :, :] * 0.9, skip))
        clone.set_model_emb_patch(lambda emb, channels, options: emb.mul_(1.2))
        return clone

    assert reasons(xl.check(patch)) == {}


def test_a_skip_returned_as_a_view_is_taken(xl: Subject) -> None:
    def patch(model: Any) -> Any:
        clone = model.clone()
        clone.set_model_output_block_patch(
            lambda h, skip, options: (h.flip(3).transpose(2, 3).contiguous().transpose(2, 3), skip)
        )
        clone.set_model_input_block_patch(
            lambda h, options: h.to(memory_format=torch.channels_last)
        )
        return clone

    assert reasons(xl.check(patch, width=104)) == {}


@pytest.mark.parametrize(
    "part", some_rows([(1.0, 0.0, 1.0), (0.4, 0.0, 0.5), (0.8, 0.5, 1.0)], [(0.4, 0.0, 0.5)])
)
def test_an_eager_controlnet_leaves_everything_compiled(
    xl: Subject, part: tuple[float, float, float]
) -> None:
    strength, start, end = part
    name = xl.host.model_file("controlnet", base="narrowxl")
    image = torch.rand(1, 72, 104, 3, generator=torch.Generator().manual_seed(0))
    (net,) = xl.host.node("ControlNetLoader", control_net_name=name)
    conditioning = (xl.positive, xl.negative)
    for factor in (1.0, 0.5):  # a chain of two
        options = {"strength": strength * factor, "start_percent": start, "end_percent": end}
        conditioning = xl.host.control(conditioning, net, image, **options)
    given = {"width": 104, "height": 72, "steps": 3}
    controlled = {**given, "positive": conditioning[0], "negative": conditioning[1]}
    assert relative(xl.sample(xl.model, **controlled), xl.sample(xl.model, **given)) > 1e-3
    assert reasons(xl.check(**controlled)) == {}


@pytest.mark.parametrize("class_type", some_rows(["EasyCache", "LazyCache"], ["EasyCache"]))
def test_step_caches_skip_the_same_steps(xl: Subject, class_type: str) -> None:
    cache = node(
        xl, class_type, reuse_threshold=0.5, start_percent=0.1, end_percent=0.95, verbose=False
    )
    assert reasons(xl.check(cache, steps=6)) == {}


def test_a_model_function_wrapper_and_extra_guidance_leave_everything_compiled(xl: Subject) -> None:
    def patch(model: Any) -> Any:
        clone = node(xl, "RescaleCFG", multiplier=0.7)(model)
        clone.set_model_unet_function_wrapper(
            lambda apply, given: apply(given["input"] * 1.02, given["timestep"], **given["c"])
        )
        return clone

    assert reasons(xl.check(patch)) == {}


# --- patches inside transformer blocks -----------------------------------------------------------


def test_hypertile_sends_all_blocks_to_the_host(xl: Subject) -> None:
    tile = node(xl, "HyperTile", tile_size=32, swap_size=1, max_depth=1, scale_depth=False)
    report = xl.check(tile, width=128, height=128)
    assert reasons(report) == {"another node patches attn1_patch": xl.blocks}


def test_a_hypernetwork_sends_all_blocks_to_the_host(xl: Subject) -> None:
    folder = Path(xl.host.folder_paths.get_folder_paths("hypernetworks")[0])
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(4)
    table: dict[Any, Any] = {"activation_func": "swish", "is_layer_norm": False}
    for width in (64, 128):  # tokens and prompt
        sides = []
        for _ in "kv":
            shape = {"linear1": (2 * width, width), "linear2": (width, 2 * width)}
            weights = {
                f"{n}.weight": torch.randn(s, generator=generator) / 8 for n, s in shape.items()
            }
            biases = {f"{n}.bias": torch.zeros(s[0]) for n, s in shape.items()}
            sides.append(
                {k: v for n in shape for k, v in {**weights, **biases}.items() if k.startswith(n)}
            )
        table[width] = sides
    torch.save(table, folder / "narrow.pt")
    load = node(xl, "HypernetworkLoader", hypernetwork_name="narrow.pt", strength=0.7)
    assert reasons(xl.check(load)) == {"another node patches attn1_patch": xl.blocks}


@pytest.mark.parametrize("name", ["attn1", "attn2"])
def test_a_replaced_attention_sends_only_its_block_to_the_host(xl: Subject, name: str) -> None:
    def halved(q: Any, k: Any, v: Any, extra: Any) -> Any:
        from comfy.ldm.modules.attention import optimized_attention

        return 0.3 * optimized_attention(q, k, v * 0.5, extra["n_heads"])

    def patch(model: Any) -> Any:
        clone = model.clone()
        replace = getattr(clone, f"set_model_{name}_replace")
        replace(halved, "input", 3)  # the whole place
        replace(halved, "input", 5, 1)  # the second of two blocks
        return clone

    report = xl.check(patch, width=104, height=72)
    assert reasons(report) == {f"another node replaces {name}": 2}
    assert report["eager"][0]["examples"] == [
        "input_blocks.3.1.transformer_blocks.0",
        "input_blocks.5.1.transformer_blocks.1",
    ]


WITHIN = ("attn1_patch", "attn1_output_patch", "middle_patch", "attn2_patch", "attn2_output_patch")


@pytest.mark.parametrize("name", some_rows(WITHIN, ["attn2_patch", "middle_patch"]))
def test_every_patch_within_a_block_acts(xl: Subject, name: str) -> None:
    def patch(model: Any) -> Any:
        clone = model.clone()
        if name in ("attn1_patch", "attn2_patch"):  # like IPAdapter: tokens of an image on top
            clone.set_model_patch(
                lambda q, k, v, extra: (
                    q,
                    torch.cat([k, k[:, :5]], 1),
                    torch.cat([v, -v[:, :5]], 1),
                ),
                name,
            )
        else:
            clone.set_model_patch(lambda x, extra: x * 1.3, name)
        return clone

    assert reasons(xl.check(patch)) == {f"another node patches {name}": xl.blocks}


@pytest.mark.parametrize("class_type", ["PerturbedAttentionGuidance", "SelfAttentionGuidance"])
def test_attention_guidance_sends_the_middle_block_to_the_host(
    xl: Subject, class_type: str
) -> None:
    widgets = {"scale": 2.0}
    if class_type == "SelfAttentionGuidance":
        widgets["blur_sigma"] = 2.0
    report = xl.check(node(xl, class_type, **widgets), width=168, height=168)
    assert reasons(report) == {"another node replaces attn1": 1}
    assert report["eager"][0]["examples"] == ["middle_block.1.transformer_blocks.0"]


def test_an_attention_override_acts_within_compiled_blocks(xl: Subject) -> None:
    """As nodes for SageAttention set it: it gets what the host's blocks pass, and nothing is built
    for it.
    """
    calls: list[Any] = []

    def override(original: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        calls.append((original.__name__, q.shape, k.shape, rest, sorted(named)))
        return original(q, k, v * 1.5, *rest, **named)

    def patch(model: Any) -> Any:
        clone = model.clone()
        clone.model_options["transformer_options"]["optimized_attention_override"] = override
        return clone

    jobs = xl.lab.jobs()
    assert reasons(xl.check(patch)) == {} and xl.lab.jobs() == jobs
    eager, compiled = patch(xl.model), patch(xl.compiled)
    seen = []
    for model in (eager, compiled):
        calls.clear()
        xl.sample(model, steps=1)
        seen.append(list(calls))
    assert len(seen[0]) == len(seen[1]) == 2 * xl.blocks, "two of each block"
    assert [call[:2] for call in seen[0]] == [call[:2] for call in seen[1]]


def test_gligen_sends_all_blocks_to_the_host(xl: Subject) -> None:
    import comfy.gligen

    generator = torch.Generator().manual_seed(2)
    names = [
        name
        for name, module in xl.unet.named_modules()
        if type(module).__name__ == "BasicTransformerBlock"
    ]
    fuser = comfy.gligen.GatedSelfAttentionDense(64, 64, 1, 64)
    position = comfy.gligen.PositionNet(64, 64)
    weights = {}
    for name in names:
        for key, value in fuser.state_dict().items():
            weights[f"{name}.fuser.{key}"] = torch.randn(value.shape, generator=generator) / 8
    for key, value in position.state_dict().items():
        weights[f"position_net.{key}"] = torch.randn(value.shape, generator=generator) / 8
    folder = Path(xl.host.folder_paths.get_folder_paths("gligen")[0])
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weights, folder / "narrow.pt")
    (gligen,) = xl.host.node("GLIGENLoader", gligen_name="narrow.pt")
    (positive,) = xl.host.node(
        "GLIGENTextBoxApply",
        conditioning_to=xl.positive,
        clip=xl.clip,
        gligen_textbox_model=gligen,
        text="a dog",
        width=32,
        height=32,
        x=16,
        y=16,
    )
    assert relative(xl.sample(xl.model, positive=positive), xl.sample(xl.model)) > 1e-3
    assert reasons(xl.check(positive=positive)) == {"another node patches middle_patch": xl.blocks}


# --- modules that other nodes change -------------------------------------------------------------


def test_a_forward_replaced_by_an_object_patch_runs_and_is_named(xl: Subject) -> None:
    def halve(forward: Any) -> Any:
        return lambda *args, **named: 0.5 * forward(*args, **named)

    report = xl.check(object_patch(f"{RESIDUAL}.forward", halve))
    assert reasons(report) == {"another node replaces the forward of a ResBlock": 1}
    assert report["eager"][0]["examples"] == ["middle_block.0"]


def test_after_an_object_patch_on_a_forward_is_gone_all_places_are_compiled_again(
    xl: Subject,
) -> None:
    patch = object_patch(f"{RESIDUAL}.forward", lambda forward: lambda *args: forward(*args) * 0.5)
    xl.sample(patch(xl.compiled))
    assert reasons(xl.check()) == {}


def called(xl: Subject, patch: Any = None) -> dict[str, int]:
    """Check a patch until the graphs are there that call what it replaces: everything is compiled
    then. Returns {why: number of layers that are called for it}.
    """
    patches = [] if patch is None else [patch]
    assert set(reasons(xl.check(*patches))) <= {"it is being compiled"}
    xl.lab.wait_until(lambda: not xl.lab.engine._graphs.awaited())
    jobs = xl.lab.jobs()
    report = xl.check(*patches)
    assert reasons(report) == {} and xl.lab.jobs() == jobs
    layers = [layer for kind in report["kinds"] for layer in kind["layers"]]
    return {layer["why"]: layer["count"] for layer in layers}


def test_a_replaced_inner_forward_is_called_within_its_compiled_block(xl: Subject) -> None:
    patch = object_patch(
        f"{BLOCK}.attn1.to_q.forward", lambda forward: lambda x: torch.tanh(forward(x))
    )
    found = called(xl, patch)
    assert found["another node replaces the forward of a Linear"] == 1
    assert reasons(xl.check()) == {}


@pytest.mark.parametrize("part", ["attn1", pytest.param("attn2", marks=pytest.mark.slow), "ff"])
def test_a_replaced_part_is_called_within_its_compiled_block(xl: Subject, part: str) -> None:
    """As packs do that attend to references, or in tiles."""

    def reference(forward: Any) -> Any:
        def around(x: Any, *rest: Any, **named: Any) -> Any:
            if part != "ff":
                assert named.keys() == {"context", "value", "transformer_options"}
                assert "block" in named["transformer_options"]
            return forward(x.roll(1, dims=1), *rest, **named)

        return around

    found = called(xl, object_patch(f"{BLOCK}.{part}.forward", reference))
    name = "FeedForward" if part == "ff" else "CrossAttention"
    assert found == {f"another node replaces the forward of a {name}": 1}


@pytest.mark.parametrize(
    "parts",
    [
        ("attn1", "attn2", "ff"),
        pytest.param(
            ("attn1.to_v", "attn1.to_q", "attn2.to_k", "attn2", "ff.net.2"), marks=pytest.mark.slow
        ),
    ],
    ids=["parts", "products"],
)
def test_others_code_within_a_block_is_called_in_the_order_of_eager(
    xl: Subject, parts: tuple[str, ...]
) -> None:
    """Beside an attention of a node's, which counts with it."""
    counting = Counting()

    def patch(model: Any) -> Any:
        clone = model.clone()
        for part in parts:
            name = f"{BLOCK}.{part}"
            forward = functools.partial(_forward, model.get_model_object(name))
            clone.add_object_patch(f"{name}.forward", counting.around(part, forward))
        options = clone.model_options["transformer_options"]
        options["optimized_attention_override"] = counting.attend
        return clone

    eager, ours = patch(xl.model), patch(xl.compiled)
    xl.sample(ours, steps=1)
    xl.lab.wait_until(lambda: not xl.lab.engine._graphs.awaited())
    xl.sample(ours, steps=1)  # compared with the host's maths
    found = []
    for model in (ours, eager):
        counting.begin()
        found.append((xl.sample(model, steps=1), list(counting.calls)))
    (image, calls), (wanted, expected) = found
    assert calls == expected and len(calls) >= len(parts) + 2 * xl.blocks
    assert relative(image, wanted) < TOLERANCE < relative(wanted, xl.sample(xl.model, steps=1))
    assert reasons(xl.report(ours)) == {}


def _forward(part: Any, *args: Any, **named: Any) -> Any:
    return type(part).forward(part, *args, **named)


class _Halved(torch.nn.Module):
    """What some packs put in a module's place."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **named: Any) -> Any:
        return 0.5 * self.inner(*args, **named)


@pytest.mark.parametrize("part", some_rows(["attn2", "ff", "attn1.to_v"], ["attn1.to_v"]))
def test_a_replaced_module_within_a_block_runs_and_is_named(xl: Subject, part: str) -> None:
    report = xl.check(object_patch(f"{BLOCK}.{part}", _Halved))
    assert sum(reasons(report).values()) == 1, reasons(report)
    assert report["eager"][0]["examples"] == ["input_blocks.3.1.transformer_blocks.0"]
    assert reasons(xl.check()) == {}  # and is forgotten with its patch


def test_a_replaced_residual_block_runs_and_is_named(xl: Subject) -> None:
    from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock

    class Scaled(ResBlock):
        def __init__(self, inner: Any) -> None:
            torch.nn.Module.__init__(self)
            self.inner = inner

        def forward(self, x: Any, emb: Any) -> Any:
            return 0.5 * self.inner(x, emb)

    report = xl.check(object_patch(RESIDUAL, Scaled))
    assert sum(reasons(report).values()) == 1
    assert report["eager"][0]["examples"] == ["middle_block.0"]


def test_a_module_swapped_for_one_of_the_same_class_uses_its_own_weights(xl: Subject) -> None:
    import copy

    def other(module: Any) -> Any:
        twin = copy.deepcopy(module)
        for parameter in twin.parameters():
            parameter.mul_(0.5)
        return twin

    xl.check(object_patch(RESIDUAL, other))
    xl.check(object_patch(f"{BLOCK}.attn1.to_v", other))


def test_a_changed_setting_of_a_module_acts(xl: Subject) -> None:
    report = xl.check(
        object_patch(f"{BLOCK}.attn1.heads", lambda heads: 2 * heads), when_missing="never"
    )
    [(reason, places)] = reasons(report).items()
    assert reason.startswith("no compiled graph") and places == 1  # two heads are another kind
    assert reasons(xl.check()) == {}


@pytest.mark.parametrize("how", ["forward", "module", "hook"])
def test_a_wrapper_that_changes_modules_around_each_call_is_noticed(
    host: Host, make_lab: Callable[..., Lab], how: str
) -> None:
    """No graph is there that calls the layer, whichever other tests had built."""
    from comfy.patcher_extension import WrappersMP

    xl = Subject(make_lab(without=("Transformer block 64 (parts called)",)), host, "narrowxl")
    block = xl.unet.get_submodule("input_blocks.3.1.transformer_blocks.0")
    layer = block.ff

    def around(executor: Any, *args: Any, **named: Any) -> Any:
        handle = None
        if how == "forward":
            layer.forward = lambda x: 0.5 * type(layer).forward(layer, x)
        elif how == "module":
            block.ff = _Halved(layer)
        else:
            handle = layer.register_forward_hook(lambda m, given, result: result * 0.5)
        try:
            return executor(*args, **named)
        finally:
            block.ff = layer
            layer.__dict__.pop("forward", None)
            if handle is not None:
                handle.remove()

    def patch(model: Any) -> Any:
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "another", around)
        return clone

    report = xl.check(patch, when_missing="never")
    assert sum(reasons(report).values()) == 1
    assert report["eager"][0]["examples"] == ["input_blocks.3.1.transformer_blocks.0"]
    assert reasons(xl.check()) == {} and xl.lab.jobs() == 0


@pytest.mark.parametrize("kind", some_rows(["forward", "forward_pre"], ["forward"]))
@pytest.mark.parametrize("path", ["middle_block.0", "input_blocks.3.1.transformer_blocks.0.ff"])
def test_hooks_act_around_what_is_compiled(xl: Subject, kind: str, path: str) -> None:
    module = xl.unet.get_submodule(path)
    if kind == "forward":
        handle = module.register_forward_hook(lambda m, args, result: result * 0.7)
    else:
        handle = module.register_forward_pre_hook(lambda m, args: (args[0] * 0.7, *args[1:]))
    try:
        found = called(xl)
    finally:
        handle.remove()
    is_part = path.endswith("ff")
    assert found == ({"another node hooks a FeedForward": 1} if is_part else {})
    assert reasons(xl.check()) == {}


def test_a_class_whose_code_was_replaced_runs_its_new_code(
    xl: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy.ldm.modules.attention import FeedForward

    original = FeedForward.forward
    monkeypatch.setattr(
        FeedForward, "forward", functools.wraps(original)(lambda self, x: 0.5 * original(self, x))
    )
    compiled = xl.lab.compiled(xl.model, when_missing="never")
    changed = xl.sample(xl.model)
    assert relative(xl.sample(compiled), changed) < TOLERANCE
    assert relative(xl.sample(xl.lab.compiled(xl.model, when_missing="never")), changed) < TOLERANCE
    monkeypatch.undo()
    assert relative(xl.sample(xl.model), changed) > 1e-3
    assert reasons(xl.check()) == {}


# --- LoRA hooks ----------------------------------------------------------------------------------


def test_a_hook_lora_on_one_prompt_is_applied_between_the_calls_of_a_step(xl: Subject) -> None:
    name = xl.host.model_file("lora", base="narrowxl")
    (hooks,) = xl.host.node("CreateHookLoraModelOnly", lora_name=name, strength_model=1.5)
    (keyframe,) = xl.host.node("CreateHookKeyframe", strength_mult=0.5, start_percent=0.5)
    (hooks,) = xl.host.node("SetHookKeyframes", hooks=hooks, hook_kf=keyframe)
    (positive,) = xl.host.node(
        "ConditioningSetProperties",
        cond_NEW=xl.positive,
        strength=1.0,
        set_cond_area="default",
        hooks=hooks,
    )
    plain = xl.sample(xl.model, steps=3)
    assert relative(xl.sample(xl.model, steps=3, positive=positive), plain) > 1e-3
    assert reasons(xl.check(positive=positive, steps=3)) == {}
    assert torch.equal(xl.sample(xl.model, steps=3), plain)
