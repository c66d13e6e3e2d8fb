"""Quantised files run compiled: the host's own products, our graphs around them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.debugging import Debugging
from warmgraph_tools import checkpoints
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import FORMATS, quantised

from .lab import TOLERANCE, Lab, Probe, relative, sampled
from .paged import Paged, Scaled, in_main_memory
from .quantised_runs import (
    LAYER,
    QUANTISED,
    Flux,
    flux,
    rounded_layers,
    rounding,
    with_input_scales,
)
from .transformer_runs import EXPECTED

#: What is said of a format that this device has no product for: a processor has none for fp8.
UNPACKED = ": this device unpacks it at each call; int8 files are multiplied as they are"
#: By kind of a model, the layer that a LoRA changes.
LAYERS = {"flux1": LAYER, "wan": "blocks.1.ffn.0"}


def prompts(kind: str) -> Iterator[tuple[Any, torch.Tensor]]:
    """Two prompts with their latents, which have no size in common."""
    for height, width, batch, tokens in ((8, 8, 1, 13), (12, 10, 2, 5)):
        latent = transformers.latent(kind, height, width, batch=batch)
        yield transformers.conditioning(kind, tokens), latent


def a_lora_builds_nothing(
    host: Host,
    lab: Lab,
    model: Any,
    compiled: Any,
    prompt: Any,
    latent: torch.Tensor,
    layer: str = LAYER,
) -> None:
    """It is in the image, as in the host's, and in the graphs that there are."""
    key, built = f"diffusion_model.{layer}.weight", lab.builds()
    shape = model.model.diffusion_model.get_submodule(layer).weight.shape
    added = 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(9))
    clone, plain = compiled.clone(), model.clone()
    for each in (clone, plain):
        assert each.add_patches({key: ("diff", (added,))}) == [key]
    with_lora, without, theirs = sampled(host, (clone, compiled, plain), prompt, latent)
    assert relative(with_lora, theirs) < 2 * QUANTISED < relative(with_lora, without)
    assert lab.builds() == built and lab.engine.report(clone)["calls"]["eager"] == 0


@pytest.mark.parametrize("form", [form for form in FORMATS if not form.endswith("_inputs")])
def test_quantised_blocks_are_compiled_around_the_hosts_own_products(
    host: Host, shared: Lab, form: str
) -> None:
    model = transformers.load_quantised("flux1", form)
    built = shared.builds()
    compiled = shared.compiled(model)
    assert shared.builds() - built <= 3
    report = shared.engine.report(compiled)
    assert report["regions"] == {"total": 5, "compiled": 5, "eager": 0}, report["eager"]
    for prompt, latent in prompts("flux1"):
        eager, ours = sampled(host, (model, compiled), prompt, latent)
        assert eager.isfinite().all() and relative(ours, eager) < QUANTISED
    report = shared.engine.report(compiled)
    assert report["calls"]["compiled"] == 4 * 5 and report["regions"]["eager"] == 0, report["eager"]
    words = f"linear layers stay as they are (quantised, {FORMATS[form].marks['format']}"
    assert any(words in note for note in report["notes"]), report["notes"]

    a_lora_builds_nothing(host, shared, model, compiled, prompt, latent)


def test_layers_of_several_formats_share_the_graphs_of_one(host: Host, shared: Lab) -> None:
    """Files mix them: what a card is good at, and full precision where it counts."""

    def mixed(name: str) -> str:
        return "fp8_e4m3fn" if "mlp" in name else "int8_convrot"

    model = transformers.load_quantised("flux1", mixed)
    shared.compiled(transformers.load_quantised("flux1", "int8"))
    built = shared.builds()
    compiled = shared.compiled(model)
    prompt = transformers.conditioning("flux1", 13)
    latent = transformers.latent("flux1", 8, 8)
    eager, ours = sampled(host, (model, compiled), prompt, latent)
    assert relative(ours, eager) < QUANTISED and shared.builds() == built
    report = shared.engine.report(compiled)
    assert report["calls"] == {**report["calls"], "compiled": 2 * 5, "eager": 0}, report["eager"]
    products = "{} linear layers stay as they are ({}); all around them is compiled"
    assert report["notes"][-3:] == [
        products.format(18, "quantised, int8_tensorwise: multiplied as it is"),
        products.format(8, f"quantised, float8_e4m3fn{UNPACKED}"),
        products.format(2, "plain weights in a quantised file"),
    ]


@pytest.mark.parametrize("form", ["int8_convrot", "fp8_e4m3fn"])
def test_quantised_blocks_of_a_video_model(host: Host, shared: Lab, form: str) -> None:
    model = transformers.load_quantised("wan", form)
    compiled = shared.compiled(model)
    prompt = transformers.conditioning("wan", 13)
    for height, width, frames in ((8, 8, 1), (6, 10, 3)):
        latent = transformers.latent("wan", height, width, frames=frames)
        eager, ours = sampled(host, (model, compiled), prompt, latent)
        assert eager.isfinite().all() and relative(ours, eager) < QUANTISED
    report = shared.engine.report(compiled)
    assert report["calls"] == {**report["calls"], "compiled": 4 * 3, "eager": 0}, report["eager"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zimage", "qwen", "flux2", "chroma", "krea", "anima", "hunyuan"])
def test_quantised_blocks_of_every_family(host: Host, shared: Lab, kind: str) -> None:
    """One set of graphs serves all formats."""
    built = None
    for form in ("int8", "fp8_e4m3fn", "mxfp8"):
        model = transformers.load_quantised(kind, form)
        compiled = shared.compiled(model)
        for prompt, latent in prompts(kind):
            eager, ours = sampled(host, (model, compiled), prompt, latent)
            assert eager.isfinite().all() and relative(ours, eager) < 3 * QUANTISED
        report = shared.engine.report(compiled)
        assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
        assert report["calls"]["compiled"] > 0
        words = f"linear layers stay as they are (quantised, {FORMATS[form].marks['format']}"
        assert any(words in note for note in report["notes"]), report["notes"]
        built = shared.builds() if built is None else built
        assert shared.builds() == built


# --- UNets ----------------------------------------------------------------------------------------


def is_of_a_transformer_block(name: str, weight: torch.Tensor) -> bool:
    """As files of UNets have it: convolutions keep their precision."""
    return ".transformer_blocks." in name and name.endswith("weight") and weight.dim() == 2


def checkpoint(host: Host, form: str) -> tuple[Any, Any, Any]:
    """(MODEL, CLIP, VAE) of an SD1.5 file whose UNet has quantised layers, by the host's loader."""
    name = f"narrow15-{form}.safetensors"
    path = host.base / "models" / "checkpoints" / name
    if not path.is_file():
        weights = checkpoints.make("narrow15")
        file = quantised(weights, form, takes=is_of_a_transformer_block)
        checkpoints.write(file, path)
    return host.nodes.CheckpointLoaderSimple().load_checkpoint(name)


@pytest.mark.parametrize(
    "only",
    [pytest.param(("transformer block",), id="what is quantised"), pytest.param((), id="all")],
)
@pytest.mark.slow
def test_a_quantised_unet_runs_compiled_with_and_without_a_lora(
    host: Host, shared: Lab, tmp_path: Path, only: tuple[str, ...]
) -> None:
    lora = host.model_file("lora", base="narrow15")
    lab = shared.copy_to(tmp_path, Debugging(only=only))
    try:
        for number, form in enumerate(("fp8_e4m3fn", "int8")):
            probe = Probe()
            model, clip, _ = checkpoint(host, form)
            built = lab.builds()
            compiled = lab.compiled(probe.attach(model))
            block = model.model.diffusion_model.middle_block[1].transformer_blocks[0]
            assert block.attn1.to_q.quant_format == FORMATS[form].marks["format"]
            prompt, other = host.encode(clip, "a cat on a hill"), host.encode(clip, "blurry")
            images = []
            for strength in (None, 1.0, 0.5, 0.0, None):
                given = compiled
                if strength is not None:
                    named = {"lora_name": lora, "strength_model": strength}
                    (given,) = host.node("LoraLoaderModelOnly", model=compiled, **named)
                images.append(host.sample(given, prompt, other, width=72, height=96))
            assert images[0].isfinite().all() and torch.equal(images[0], images[4])
            assert relative(images[1], images[0]) > 10 * QUANTISED
            host.sample(compiled, prompt, other, batch=2)
            assert max(call.error for call in probe.calls) < QUANTISED
            report = lab.engine.report(compiled)
            left = {kind["kind"]: kind["places"] for kind in report["kinds"] if not kind["key"]}
            assert not only or "Transformer block 64" not in left
            assert report["regions"]["eager"] == sum(left.values()), report["eager"]
            assert report["calls"]["eager"] == 0 < report["regions"]["compiled"]
            assert lab.builds() - built == (0 if number else len(report["kinds"]) - len(left))
            words = f"linear layers stay as they are (quantised, {FORMATS[form].marks['format']}"
            assert any(words in note for note in report["notes"]), report["notes"]
    finally:
        lab.engine.close()


# --- restarts -------------------------------------------------------------------------------------


def test_a_fresh_engine_loads_what_was_built(host: Host, shared: Lab, tmp_path: Path) -> None:
    shared.compiled(transformers.load_quantised("flux1", "int8"))
    lab = shared.copy_to(tmp_path)
    try:
        for form in ("int8", "nvfp4"):
            run = Flux(host, lab, transformers.load_quantised("flux1", form))
            assert relative(*run.images()) < QUANTISED
            assert lab.engine.report(run.ours)["calls"]["eager"] == lab.jobs() == 0
    finally:
        lab.engine.close()


# --- damaged files --------------------------------------------------------------------------------


# --- other packs' files ---------------------------------------------------------------------------

PACK = """
import torch
import comfy.ops

NODE_CLASS_MAPPINGS = {}


class Bytes(torch.Tensor):
    # With a scale, and what a LoRA adds kept beside it.
    scale, added = 1.0, None


def packed(weight):
    scale = weight.abs().max() / 127
    made = (weight / scale).round().to(torch.int8).as_subclass(Bytes)
    made = torch.nn.Parameter(made, requires_grad=False)
    made.scale = scale
    return made


class Ops(comfy.ops.manual_cast):
    class Linear(comfy.ops.manual_cast.Linear):
        def forward_comfy_cast_weights(self, input):
            weight = self.weight
            if isinstance(weight, Bytes):
                unpacked = weight.as_subclass(torch.Tensor).to(input.dtype) * weight.scale
                weight = unpacked if weight.added is None else unpacked + weight.added
            return torch.nn.functional.linear(input, weight, self.bias)

    class LayerNorm(comfy.ops.manual_cast.LayerNorm):
        def forward_comfy_cast_weights(self, input):
            return super().forward_comfy_cast_weights(input)

    class RMSNorm(torch.nn.RMSNorm):  # torch's own has no bias
        def forward(self, input):
            return torch.nn.functional.rms_norm(input, self.normalized_shape, self.weight, self.eps)
"""


def test_a_packs_own_file_runs_compiled_around_its_products_and_norms(
    host: Host, shared: Lab, install_pack: Any
) -> None:
    """As the pack for GGUF files does it: classes, tensors and LoRAs of its own."""
    import comfy.sd

    folder = str(install_pack("bytes-pack", {"__init__.py": PACK}))
    pack = sys.modules[folder.replace(".", "_x_")]
    model = comfy.sd.load_diffusion_model_state_dict(
        transformers.weights("wan"),
        model_options={"custom_operations": pack.Ops},
        metadata={"config": json.dumps({"transformer": {"text_dim": 64}})},
    )
    for block in model.model.diffusion_model.blocks:
        for layer in block.modules():
            if isinstance(layer, pack.Ops.Linear):
                layer.weight = pack.packed(layer.weight.data)
    compiled = shared.compiled(model)
    built = shared.builds()
    prompt, latent = transformers.conditioning("wan", 13), transformers.latent("wan", 8, 8)
    weight = block.ffn[0].weight
    images = []
    for added in (None, 0.05, None):
        weight.added = added
        eager, ours = sampled(host, (model, compiled), prompt, latent)
        assert relative(ours, eager) < TOLERANCE
        images.append(ours)
    assert torch.equal(images[0], images[2])
    assert relative(images[1], images[0]) > 10 * TOLERANCE
    report = shared.engine.report(compiled)
    assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
    assert shared.builds() == built
    left = [note for note in report["notes"] if "stay as they are" in note]
    assert any("linear layers" in note and "Bytes" in note for note in left), left
    assert any("norms" in note and "Ops.LayerNorm of bytes-pack" in note for note in left), left


# --- fp8 where the device multiplies it -----------------------------------------------------------


@pytest.mark.usefixtures("multiplies_fp8")
@pytest.mark.parametrize(
    ("kind", "rounded"),
    [("wan", [10, 0]), pytest.param("flux1", [10, 3, 0], marks=pytest.mark.slow)],
)
def test_a_graph_rounds_the_inputs_of_fp8_products_by_their_scales(
    host: Host, shared: Lab, tmp_path: Path, kind: str, rounded: list[int]
) -> None:
    def load() -> Any:
        return transformers.load_quantised(kind, "fp8_e4m3fn", change=with_input_scales)

    model = load()
    compiled = shared.compiled(model)
    assert rounded_layers(compiled) == rounded
    for prompt, latent in prompts(kind):
        eager, ours = sampled(host, (model, compiled), prompt, latent)
        assert eager.isfinite().all() and relative(ours, eager) < QUANTISED
    report = shared.engine.report(compiled)
    places = EXPECTED[kind].places
    assert report["calls"] == {**report["calls"], "compiled": 4 * places, "eager": 0}, report[
        "eager"
    ]

    a_lora_builds_nothing(host, shared, model, compiled, prompt, latent, LAYERS[kind])

    lab = shared.copy_to(tmp_path)
    try:
        model = load()
        compiled = lab.compiled(model)
        eager, ours = sampled(host, (model, compiled), prompt, latent)
        assert relative(ours, eager) < QUANTISED
        assert lab.engine.report(compiled)["calls"]["eager"] == lab.jobs() == 0
    finally:
        lab.engine.close()


@pytest.mark.usefixtures("multiplies_fp8")
@pytest.mark.parametrize("kind", ["wan", pytest.param("flux1", marks=pytest.mark.slow)])
def test_a_layer_that_does_not_round_now_is_the_hosts_once_and_then_has_a_second_graph(
    host: Host, shared: Lab, kind: str
) -> None:
    """A LoRA that is applied at each call: the host unpacks the weight and multiplies in full."""
    model = rounding(kind)
    compiled = shared.compiled(model)
    prompt, latent = transformers.conditioning(kind, 13), transformers.latent(kind, 8, 8)
    layer = model.model.diffusion_model.get_submodule(LAYERS[kind])
    name, places = LAYERS[kind].split(".", 2)[2], EXPECTED[kind].places
    scope = compiled.get_attachment("warmgraph").scope
    images, reports = [], []
    patched = [lambda weight: 1.5 * weight]
    for functions in ([], patched, patched, patched, []):
        object.__setattr__(layer, "weight_function", functions)
        eager, ours = sampled(host, (model, compiled), prompt, latent)
        shared.wait_until(lambda: not any(graph.is_pending for graph in scope.second_graphs))
        assert relative(ours, eager) < QUANTISED
        images.append(ours)
        reports.append(shared.engine.report(compiled))
    assert torch.equal(images[0], images[4])
    assert relative(images[1], images[0]) > 2 * QUANTISED
    before, first, _, later, after = reports
    whole = {"total": places, "compiled": places, "eager": 0}
    assert before["regions"] == later["regions"] == after["regions"] == whole
    assert first["regions"] == {"total": places, "compiled": places - 1, "eager": 1}
    assert f"weights of {name} are patched at each call" in first["eager"][0]["reason"]
    assert after["calls"]["compiled"] - later["calls"]["compiled"] == 2 * places
    assert later["calls"]["compiled"] - reports[2]["calls"]["compiled"] == 2 * places
    assert [kind["variants"] for kind in later["kinds"]].count({"unrounded": "ready"}) == 1
    again = shared.engine.report(shared.compiled(model))
    other = shared.engine.report(shared.compiled(rounding(kind)))  # no call of it needed another
    for report, reused in ((again, EXPECTED[kind].kinds + 1), (other, EXPECTED[kind].kinds)):
        assert report["builds"] == report["loads"] == 0
        assert report["reused"] == reused


@pytest.mark.usefixtures("multiplies_fp8")
def test_what_the_host_multiplies_in_fp8_as_it_is_stays_its_own(host: Host, shared: Lab) -> None:
    model = transformers.load_quantised("flux1", transformers.FAST)
    compiled = shared.compiled(model)
    built = shared.builds()
    prompt, latent = transformers.conditioning("flux1", 13), transformers.latent("flux1", 8, 8)
    eager, ours = sampled(host, (model, compiled), prompt, latent)
    assert eager.isfinite().all() and relative(ours, eager) < QUANTISED
    a_lora_builds_nothing(host, shared, model, compiled, prompt, latent)
    report = shared.engine.report(compiled)
    assert report["regions"] == {"total": 5, "compiled": 5, "eager": 0}, report["eager"]
    assert shared.builds() == built
    words = "28 linear layers stay as they are (weights in fp8, multiplied as they are)"
    assert any(words in note for note in report["notes"]), report["notes"]


# --- dynamic VRAM ---------------------------------------------------------------------------------


@pytest.fixture
def pages_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy import model_management

    in_main_memory(monkeypatch)
    monkeypatch.setattr(model_management, "is_device_cpu", lambda _: False)


@pytest.mark.usefixtures("pages_in_main_memory")
@pytest.mark.parametrize("form", ["int8", "fp8_e4m3fn", "mxfp8", "nvfp4"])
def test_the_hosts_layers_take_their_weights_from_pages(host: Host, shared: Lab, form: str) -> None:
    """When they were brought there in this call, and from the second step on. A LoRA changes what
    lies there, by the host's own functions.
    """
    run = Flux(host, shared, flux(form))
    resident, _ = run.images()
    built = shared.builds()
    paged = Paged(run.plain)
    layer = run.plain.model.diffusion_model.get_submodule(LAYER)
    for lora in (None, Scaled()):  # weights of a new class are compared with the host's own layers
        layer.weight_lowvram_function = lora
        paged.empty()
        run.sample(run.ours)
    found = []
    for lora in (None, Scaled(), None):
        layer.weight_lowvram_function = lora
        images = []
        for model in (run.ours, run.plain):
            paged.empty()
            images += [paged.sample(run, model) for _ in range(2)]
        assert lora is None or lora.calls == 2, "once after each time that the pages were empty"
        for ours, hosts in zip(images[:2], images[2:], strict=True):
            assert relative(ours, hosts) < QUANTISED
        found.append(images[0])
    assert torch.equal(found[0], found[2]) and relative(found[0], resident) < QUANTISED
    assert relative(found[1], found[0]) > 2 * QUANTISED
    assert shared.builds() == built and run.is_compiled()
