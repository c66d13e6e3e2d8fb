"""Which models run compiled, which run eager and say so, and what foreign layers and weights do."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.debugging import Debugging
from warmgraph_backends.errors import StrictError
from warmgraph_tools import checkpoints
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.by_path import ADOPT
from warmgraph_tools.inprocess import Host
from warmgraph_tools.layouts import UNETS

from .lab import TOLERANCE, Lab, relative
from .subject import Subject, reasons

FP8 = torch.float8_e4m3fn
CAST = ("ResBlock 64->64", "Transformer block 64")
"""Kinds that show with fp8 weights what there is to show."""


@pytest.fixture(scope="module")
def xl(lab: Lab, host: Host) -> Subject:
    return Subject(lab, host, "narrowxl")


def evaluate(patcher: Any, inner: Any = None, *, load: bool = True, **inputs: Any) -> torch.Tensor:
    """Run one model evaluation with a patcher's wrappers, as a run of one step does.

    Args:
        inner: the BaseModel to call, another one than the patcher's for a copy on another GPU.
        load: whether the host loads the model first.
    """
    import comfy.model_management as management
    from comfy.patcher_extension import merge_nested_dicts

    if load:
        management.load_models_gpu([patcher])
    options = dict(patcher.model_options.get("transformer_options", {}))
    options["wrappers"] = merge_nested_dicts(options.get("wrappers", {}), patcher.wrappers)
    patcher.pre_run()
    try:
        model = inner or patcher.model
        result: torch.Tensor = model.apply_model(**inputs, transformer_options=options)
    finally:
        patcher.cleanup()
    return result


def inputs(batch: int = 2, *, channels: int = 4, context: int = 128, y: int = 1600) -> Any:
    """Random inputs of one evaluation; the defaults are narrowxl's."""
    generator = torch.Generator().manual_seed(5)
    made = {
        "x": torch.randn(batch, channels, 9, 7, generator=generator),
        "t": torch.full((batch,), 3.0),
        "c_crossattn": torch.randn(batch, 77, context, generator=generator),
    }
    return {**made, "y": torch.randn(batch, y, generator=generator)} if y else made


def by_hand(model_class: str, config_class: str, seed: int = 0, **unet: Any) -> Any:
    """A ModelPatcher around a model of the host built from a configuration, with random weights."""
    import comfy.model_base
    import comfy.supported_models
    from comfy.model_patcher import ModelPatcher

    config = getattr(comfy.supported_models, config_class)({**unet, "dtype": torch.float32})
    cpu = torch.device("cpu")
    model = getattr(comfy.model_base, model_class)(config, device=cpu)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.diffusion_model.named_parameters()):
        drawn = (
            torch.randn(parameter.shape, generator=generator) * max(parameter[0].numel(), 1) ** -0.5
        )
        parameter.copy_(drawn + float(name.endswith("weight") and parameter.dim() == 1))
    return ModelPatcher(model, load_device=cpu, offload_device=cpu)


def narrow_file(host: Host, name: str, change: Any, kind: str = "narrowxl") -> str:
    """A diffusion model file: narrowxl's weights, changed; returns its name for UNETLoader."""
    prefix = "model.diffusion_model."
    weights = checkpoints.make(kind)
    unet = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    checkpoints.write(change(unet), host.base / "models" / "diffusion_models" / name)
    return name


# --- models of the host's UNet -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["narrow15", pytest.param("narrow20", marks=pytest.mark.slow)])
def test_sd15_and_sd2_layouts_run_compiled(lab: Lab, host: Host, kind: str) -> None:
    subject = Subject(lab, host, kind)
    assert reasons(subject.check(width=72, height=104)) == {}

    def v_prediction(model: Any) -> Any:
        return host.node("ModelSamplingDiscrete", model=model, sampling="v_prediction", zsnr=True)[
            0
        ]

    assert reasons(subject.check(v_prediction)) == {}


def test_token_merging_sends_all_blocks_to_the_host(lab: Lab, host: Host) -> None:
    subject = Subject(lab, host, "narrow15")  # it acts at the first level only
    report = subject.check(lambda model: host.node("TomePatchModel", model=model, ratio=0.5)[0])
    assert reasons(report) == {"another node patches attn1_patch": subject.blocks}


def test_an_inpainting_model_builds_nothing_that_its_base_has_not(lab: Lab, host: Host) -> None:
    Subject(lab, host, "narrow15")
    before = lab.builds()
    subject = Subject(lab, host, "narrow15inpaint")
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(1, 64, 64)
    mask[:, 16:48] = 1.0
    positive, negative, latent = host.node(
        "InpaintModelConditioning",
        positive=subject.positive,
        negative=subject.negative,
        vae=subject.vae,
        pixels=torch.rand(1, 64, 64, 3, generator=generator),
        mask=mask,
        noise_mask=True,
    )
    given = {"positive": positive, "negative": negative, "latent": latent}
    assert reasons(subject.check(**given)) == {}
    assert subject.unet.input_blocks[0][0].in_channels == 9
    assert lab.builds() == before


def test_a_refiner_layout_runs_compiled(lab: Lab) -> None:
    unet = {  # attention on the middle level and not on the last
        **UNETS["narrowxl"],
        "transformer_depth": [0, 1, 0],
        "transformer_depth_output": [0, 0, 1, 1, 0, 0],
        "adm_in_channels": 2560,
    }
    refiner = by_hand("SDXLRefiner", "SDXLRefiner", **unet)
    compiled = lab.compiled(refiner)
    given = inputs(y=2560)
    eager, ours = evaluate(refiner, **given), evaluate(compiled, **given)
    assert relative(ours, eager) < TOLERANCE and not torch.equal(ours, eager)
    assert reasons(lab.engine.report(compiled)) == {}


def test_svds_video_blocks_run_eager_and_are_named_and_the_rest_is_compiled(lab: Lab) -> None:
    unet = {
        **UNETS["narrowxl"],
        "in_channels": 8,
        "adm_in_channels": 768,
        "use_temporal_attention": True,
        "use_temporal_resblock": True,
        "extra_ff_mix_layer": True,
        "merge_strategy": "learned_with_images",
        "video_kernel_size": [3, 1, 1],
    }
    svd = by_hand("SVD_img2vid", "SVD_img2vid", **unet)
    compiled = lab.compiled(svd)
    video = {"num_video_frames": 3, "image_only_indicator": torch.zeros(2, 3)}
    given = {**inputs(batch=6, channels=8, y=768), **video}
    given["x"], given["c_concat"] = given["x"].split(4, dim=1)
    eager, ours = evaluate(svd, **given), evaluate(compiled, **given)
    assert relative(ours, eager) < TOLERANCE and not torch.equal(ours, eager)
    report = lab.engine.report(compiled)
    classes = [type(m).__name__ for m in svd.model.diffusion_model.modules()]
    named = {reason.split()[3]: places for reason, places in reasons(report).items()}
    assert named == {
        name: classes.count(name) for name in ("VideoResBlock", "SpatialVideoTransformer")
    }
    assert report["regions"]["compiled"] == 5  # two steps down, two up, the head


def test_a_model_without_regions_runs_as_without_the_node_and_one_line_says_so(
    make_lab: Callable[..., Lab], host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    lab = make_lab()
    lab.settings.update({"learn_models": False})
    aura = transformers.load("aura")
    line = (
        "this MMDiT has no regions, so nothing of it is compiled; where its "
        "whole steps cannot be captured, it runs at normal speed"
    )
    with caplog.at_level(logging.INFO):
        compiled = lab.compiled(aura)
    assert [r.getMessage() for r in caplog.records if line in r.getMessage()] == [
        f"Runs as without Warmgraph: {line}"
    ]
    prompt, latent = transformers.conditioning("aura", 16), transformers.latent("aura", 8, 8)
    eager, ours = (
        host.sample(model, prompt, prompt, cfg=1.0, latent=latent) for model in (aura, compiled)
    )
    assert torch.equal(ours, eager)
    report = lab.engine.report(compiled)
    assert report["notes"] == [line] and report["regions"]["total"] == 0
    with pytest.raises(StrictError, match="this MMDiT has no regions"):
        lab.engine.load_graphs(aura, "none", strict=True)


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels", [CAST[:1], pytest.param(CAST, marks=pytest.mark.slow)], ids=", ".join
)
def test_fp8_weights_are_cast_for_the_graphs(lab: Lab, host: Host, labels: tuple[str, ...]) -> None:
    name = narrow_file(host, "narrowxl-fp8.safetensors", lambda unet: unet)
    (model,) = host.node("UNETLoader", unet_name=name, weight_dtype="fp8_e4m3fn")
    assert model.model.get_dtype() == FP8
    compiled = lab.compiled(model, when_missing="never")
    session = compiled.get_attachment("warmgraph")
    # These classes are the host's manual_cast ones, other kinds than resident weights have.
    graphs = lab.build_only(session, labels)
    eager, ours = evaluate(model, **inputs()), evaluate(compiled, **inputs())
    assert relative(ours, eager) < TOLERANCE and not torch.equal(ours, eager)
    report = lab.engine.report(compiled)
    ready = {k["kind"]: k["places"] for k in report["kinds"] if k["state"] == "ready"}
    assert report["regions"]["compiled"] == sum(ready.get(label, 0) for label in CAST)
    assert set(labels) <= set(ready)
    for graph in graphs:
        [(_, _, weights, _)] = session.scope.account.verdicts.of(graph).compared
        assert weights == "cast"


def test_a_weight_wrapper_acts_in_every_call(xl: Subject) -> None:
    def wrap(model: Any) -> Any:
        clone = model.clone()
        for name in (
            "middle_block.0.in_layers.2",
            "input_blocks.3.1.transformer_blocks.0.ff.net.2",
        ):
            clone.add_weight_wrapper(f"diffusion_model.{name}.weight", lambda weight: weight * -2.0)
        return clone

    assert reasons(xl.check(wrap)) == {}
    assert reasons(xl.check()) == {}


def test_a_lora_over_a_partly_loaded_model_is_applied_in_every_call(xl: Subject) -> None:
    import comfy.model_management as management

    name = xl.host.model_file("lora", base="narrowxl")
    plain = evaluate(xl.model, **inputs())
    results = []
    for model in (xl.model, xl.compiled):
        lora, _ = xl.host.node(
            "LoraLoader",
            model=model,
            clip=xl.clip,
            lora_name=name,
            strength_model=1.0,
            strength_clip=0.0,
        )
        management.unload_all_models()
        lora.patch_model(lora.load_device, lowvram_model_memory=1)  # nothing fits
        functions = [m.weight_function for m in xl.unet.modules() if hasattr(m, "weight_function")]
        assert any(functions), "the host must apply the LoRA in each call here"
        results.append(evaluate(lora, load=False, **inputs()))
        lora.detach()
    eager, ours = results
    assert relative(eager, plain) > 1e-3
    assert relative(ours, eager) < TOLERANCE and not torch.equal(ours, eager)
    assert reasons(xl.report(lora)) == {}
    assert torch.equal(evaluate(xl.model, **inputs()), plain)


@pytest.mark.slow
def test_layers_of_classes_made_at_run_time_stay_whose_they_are_and_are_named(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    import comfy.ops
    import comfy.sd

    lab = make_lab(debugging=Debugging(only=("transformer block",)))

    class Foreign(comfy.ops.disable_weight_init):
        class Linear(comfy.ops.disable_weight_init.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.linear(x, self.weight * 1.5, self.bias)

        class LayerNorm(comfy.ops.disable_weight_init.LayerNorm):  # GGUF's pack has one, too
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * 0.8

    name = narrow_file(host, "narrowxl-plain.safetensors", lambda unet: unet)
    path = host.base / "models" / "diffusion_models" / name
    model = comfy.sd.load_diffusion_model(
        str(path), model_options={"custom_operations": Foreign, "dtype": torch.float32}
    )
    compiled = lab.compiled(model)
    eager, ours = evaluate(model, **inputs()), evaluate(compiled, **inputs())
    assert relative(ours, eager) < TOLERANCE
    report = lab.engine.report(compiled)
    assert reasons(report).keys() == {"WARMGRAPH_DEBUG compiles transformer block only"}
    places = report["regions"]["compiled"]
    assert report["calls"] == {"compiled": places, "eager": 0} and places > 0
    notes = [note for note in report["notes"] if "stay as they are" in note]
    for what, name in (("norms", "LayerNorm"), ("linear layers", "Linear")):
        [note] = [note for note in notes if f"{what} stay as they are" in note]
        assert f"Foreign.{name} of" in note


class Packed(torch.Tensor):
    """Like GGUF's: unpacks itself when an operator takes it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.as_subclass(torch.Tensor) * 1.5 if isinstance(a, Packed) else a for a in args]
        if func is torch.nn.functional.linear:
            return func(*plain, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_packed_weight_is_left_to_the_host_and_named(xl: Subject, when: str) -> None:
    layer = xl.unet.input_blocks[3][1].transformer_blocks[0].ff.net[2]
    kept = layer.weight
    compiled = xl.lab.compiled(xl.model)
    plain = evaluate(xl.model, **inputs())
    layer._parameters["weight"] = kept.data.as_subclass(Packed)
    try:
        if when == "before":
            compiled = xl.lab.compiled(xl.model)
        eager, ours = evaluate(xl.model, **inputs()), evaluate(compiled, **inputs())
        report = xl.report(compiled)
    finally:
        layer._parameters["weight"] = kept
    assert relative(eager, plain) > 1e-4
    assert relative(ours, eager) < TOLERANCE and not torch.equal(ours, eager)
    if when == "before":  # its block is described with that one product left out
        assert reasons(report) == {}
        assert any(
            "1 linear layers stay as they are" in n and "Packed" in n for n in report["notes"]
        )
    else:
        [(reason, places)] = reasons(report).items()
        assert "Packed" in reason and places == 1


# --- whole calls that are not ours ---------------------------------------------------------------


def test_a_copy_for_another_gpu_runs_compiled(xl: Subject) -> None:
    clone = xl.compiled.deepclone_multigpu()
    assert clone.model is not xl.model.model
    before = xl.report(xl.compiled)["calls"]
    eager, found = evaluate(xl.model, **inputs()), evaluate(clone, **inputs())
    assert relative(found, eager) <= TOLERANCE and not torch.equal(found, eager)
    after = xl.report(xl.compiled)["calls"]
    assert after["compiled"] > before["compiled"] and after["eager"] == before["eager"]


def test_a_function_in_place_of_the_models_own_runs_eager_and_is_named(xl: Subject) -> None:
    from comfy.patcher_extension import WrapperExecutor, WrappersMP

    def half(executor: Any, *args: Any, **kwargs: Any) -> Any:
        own = WrapperExecutor.new_class_executor(
            lambda *a, **k: executor.original(*a, **k) * 0.5,
            executor.class_obj,
            executor.wrappers,
            executor.idx + 1,
        )
        return own.execute(*args, **kwargs)

    clone = xl.model.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another", half)
    compiled = xl.lab.compiled(clone)
    assert torch.equal(evaluate(compiled, **inputs()), evaluate(clone, **inputs()))
    notes = xl.report(compiled)["notes"]
    assert any("(another node puts its own function" in note for note in notes)


def test_an_error_before_a_run_fails_no_prompt(
    xl: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = xl.lab.compiled(xl.model)
    scope = compiled.get_attachment("warmgraph").scope

    def fails() -> None:
        raise RuntimeError("on purpose")

    eager = xl.sample(xl.model)
    with monkeypatch.context() as broken:
        broken.setattr(scope, "begin_run", fails)
        assert torch.equal(xl.sample(compiled), eager)
    notes = xl.report(compiled)["notes"]
    said = "looking at the model failed (RuntimeError: on purpose)"
    assert any(said in note for note in notes)
    assert torch.equal(xl.sample(compiled), eager), "it is not tried again"
    xl.host.unload()
    assert not torch.equal(xl.sample(compiled), eager), "loaded anew, it is ours again"


def test_training_runs_eager_and_is_named(xl: Subject) -> None:
    compiled = xl.lab.compiled(xl.model)
    gradients = []
    for model in (xl.model, compiled):
        given = inputs()
        with torch.enable_grad():
            given["x"].requires_grad_()
            result = evaluate(model, **given)
            result.square().sum().backward()
        gradients.append(given["x"].grad)
    assert torch.equal(gradients[0], gradients[1]) and gradients[0].abs().sum() > 0
    (note,) = xl.report(compiled)["notes"]
    assert note == "steps at normal speed: 1 (gradients are on (training))"
    with torch.inference_mode():  # what the host does, with gradients nominally on or off
        assert not torch.equal(evaluate(compiled, **inputs()), evaluate(xl.model, **inputs()))


@pytest.mark.parametrize("backend", ["auto", "inductor"])
@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_without_a_backend_gets_one_line_and_runs_as_without_the_node(
    xl: Subject, caplog: pytest.LogCaptureFixture, backend: str, device: str
) -> None:
    elsewhere = xl.model.clone()
    elsewhere.load_device = torch.device(device)  # nothing is put there: only the choice is asked
    compiled = xl.lab.compiled(elsewhere, backend=backend)
    [note] = xl.report(compiled)["notes"]
    assert f"this backend does not run on {device}" in note
    assert sum(note in record.getMessage() for record in caplog.records) == 1
    compiled.load_device = xl.model.load_device
    assert torch.equal(evaluate(compiled, **inputs()), evaluate(xl.model, **inputs()))


_WITHOUT_TRITON = """
sys.modules["triton"] = None  # as where it is not installed: any import of it fails
from warmgraph_backends import engine
from warmgraph_backends.compilers import registry
inductor = registry.backend_named("inductor")
print([r.reason for r in inductor.requirements("cuda") if r.name == "Triton" and not r.met])
print(registry.resolve_backend("auto", "cuda").backend.name)
try:
    registry.resolve_backend("inductor", "cuda")
except Exception as error:
    print(type(error).__name__)
"""


def test_without_triton_everything_imports_and_the_choice_falls_to_eager(host_tree: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADOPT + _WITHOUT_TRITON],
        capture_output=True,
        text=True,
        cwd=host_tree,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines() == ["['Triton is not installed']", "eager", "RequirementError"]
