"""Quantised files as they are found: old ones, flags of single layers, formats mixed, wrong sizes;
and every format in blocks of each sort.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_backends.kinds import host_layer
from warmgraph_tools import checkpoints
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import FORMATS, quantised

from .lab import Lab, Probe, relative, sampled
from .test_dynamic_weights import Memory

File = dict[str, torch.Tensor]

#: Of a call, as in `test_quantised`: the last bit of an input moves it by a step of its format.
QUANTISED = 5e-3
LAYER = "double_blocks.1.img_mlp.0"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One engine for all files: graphs are built once."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.engine.close()


@pytest.fixture
def multiplies_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load files as under --supports-fp8-compute: PyTorch has a product for processors, too."""
    from comfy import model_management

    monkeypatch.setattr(model_management, "SUPPORT_FP8_OPS", True)


def flux(
    form: str | Callable[[str], str], change: Callable[[File], Any] = lambda file: None
) -> Any:
    """A MODEL of a small Flux 1, by the host's loader, whose file was changed."""
    import comfy.sd

    file = quantised(transformers.weights("flux1"), form)
    change(file)
    return comfy.sd.load_diffusion_model_state_dict(file)


def layers_of(file: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of a file's quantised layers."""
    return [name.removesuffix(".comfy_quant") for name in file if name.endswith(".comfy_quant")]


def mark(file: File, layer: str, **marks: Any) -> None:
    """Change what a file says of a layer."""
    name = f"{layer}.comfy_quant"
    said = json.loads(bytes(file[name].tolist()))
    file[name] = torch.tensor(list(json.dumps({**said, **marks}).encode()), dtype=torch.uint8)


class Flux:
    """A small Flux 1 as the host runs it, and through Compile Model."""

    def __init__(self, host: Host, lab: Lab, model: Any) -> None:
        self.host, self.lab, self.plain = host, lab, model
        self.ours = lab.compiled(model)

    def images(self, tokens: int = 13, *size: int) -> list[torch.Tensor]:
        """Ours and the host's, two steps each."""
        prompt = transformers.conditioning("flux1", tokens)
        latent = transformers.latent("flux1", *(size or (8, 8)))
        return sampled(self.host, (self.ours, self.plain), prompt, latent)

    def is_compiled(self) -> bool:
        report = self.lab.engine.report(self.ours)
        assert report["regions"] == {"total": 5, "compiled": 5, "eager": 0}, report["eager"]
        assert report["calls"]["eager"] == 0 < report["calls"]["compiled"]
        return True

    def rounded(self) -> list[int]:
        """Of how many layers each graph rounds the input itself."""
        kinds = self.ours.get_attachment("warmgraph").scope.kinds
        modules = [kind.graph.description.module for kind in kinds]
        return [len(list(host_layer.rounded_paths(module))) for module in modules]


# --- old files ------------------------------------------------------------------------------------


def as_old_file(*, marker: int, input_scale: float | None) -> Callable[[File], None]:
    """Name the scales as files did before each layer was marked.

    Args:
        marker: of how many elements; two of them say that products are in full precision.
        input_scale: of every layer's input.
    """

    def change(file: File) -> None:
        for layer in layers_of(file):
            del file[f"{layer}.comfy_quant"]
            file[f"{layer}.scale_weight"] = file.pop(f"{layer}.weight_scale")
            if input_scale is not None:
                file[f"{layer}.scale_input"] = torch.tensor(input_scale)
        file["scaled_fp8"] = torch.zeros(marker, dtype=torch.float8_e4m3fn)

    return change


OLD = [(0, None), (0, 0.02), (1, 1.0), (2, None), (2, 0.02)]


@pytest.mark.parametrize(("marker", "input_scale"), OLD)
def test_an_old_file_of_scaled_fp8_runs_the_graphs_of_a_new_one(
    host: Host, shared: Lab, marker: int, input_scale: float | None
) -> None:
    new = Flux(host, shared, flux("fp8_e4m3fn"))
    built = shared.builds()
    change = as_old_file(marker=marker, input_scale=input_scale)
    old = Flux(host, shared, flux("fp8_e4m3fn", change))
    layer = old.plain.model.diffusion_model.get_submodule(LAYER)
    assert layer.quant_format == "float8_e4m3fn"
    assert hasattr(layer, "input_scale") is (input_scale == 0.02)
    for tokens, size in ((13, (8, 8)), (5, (12, 10))):
        ours, hosts = old.images(tokens, *size)
        assert hosts.isfinite().all() and relative(ours, hosts) < QUANTISED
    assert old.is_compiled() and shared.builds() == built
    assert torch.equal(new.images()[1], old.images()[1])


@pytest.mark.slow  # graphs of their own, with and without scales of inputs
@pytest.mark.usefixtures("multiplies_fp8")
@pytest.mark.parametrize(("marker", "input_scale"), OLD)
def test_the_marker_of_an_old_file_says_whether_its_products_are_in_fp8(
    host: Host, shared: Lab, marker: int, input_scale: float | None
) -> None:
    change = as_old_file(marker=marker, input_scale=input_scale)
    old = Flux(host, shared, flux("fp8_e4m3fn", change))
    assert old.rounded() == ([0, 0, 0] if marker == 2 else [10, 3, 0])
    built = shared.builds()
    for tokens, size in ((13, (8, 8)), (5, (12, 10))):
        ours, hosts = old.images(tokens, *size)
        # Without a scale of its input the last bit counts for more.
        assert hosts.isfinite().all() and relative(ours, hosts) < 4 * QUANTISED
    assert old.is_compiled() and shared.builds() == built


# --- products in full precision -------------------------------------------------------------------


def in_full_precision(only: str) -> Callable[[File], None]:
    """Ask for it for the layers whose name holds `only`."""

    def change(file: File) -> None:
        for layer in layers_of(file):
            if only in layer:
                mark(file, layer, full_precision_matrix_mult=True)

    return change


#: Others differ in what the host does alone.
FEW = ("int8_convrot", "fp8_e4m3fn", "nvfp4")


@pytest.mark.parametrize("only", ["", "_mlp."])
@pytest.mark.parametrize(
    "form",
    [form if form in FEW else pytest.param(form, marks=pytest.mark.slow) for form in FORMATS],
)
def test_layers_that_ask_for_full_precision_run_the_same_graphs(
    host: Host, shared: Lab, form: str, only: str
) -> None:
    shared.compiled(flux("int8"))
    built = shared.builds()
    run = Flux(host, shared, flux(form, in_full_precision(only)))
    asked = {
        name: layer._full_precision_mm_config
        for name, layer in run.plain.model.diffusion_model.named_modules()
        if getattr(layer, "quant_format", None)
    }
    assert asked == {name: only in name for name in asked} and any(asked.values())
    ours, hosts = run.images()
    assert hosts.isfinite().all() and relative(ours, hosts) < QUANTISED
    assert run.is_compiled() and shared.builds() == built
    notes = shared.engine.report(run.ours)["notes"]
    # This device unpacks the others in any case, or their products heed no such wish.
    assert not any("asks for full precision" in note for note in notes), notes


@pytest.mark.slow  # graphs of their own
@pytest.mark.usefixtures("multiplies_fp8")
@pytest.mark.parametrize(("only", "rounded"), [("", [0, 0, 0]), ("_mlp.", [6, 3, 0])])
def test_a_graph_rounds_nothing_for_layers_that_ask_for_full_precision(
    host: Host, shared: Lab, only: str, rounded: list[int]
) -> None:
    all_in_fp8 = Flux(host, shared, flux("fp8_e4m3fn_inputs"))
    run = Flux(host, shared, flux("fp8_e4m3fn_inputs", in_full_precision(only)))
    assert run.rounded() == rounded
    built = shared.builds()
    ours, hosts = run.images()
    assert relative(ours, hosts) < QUANTISED
    assert relative(all_in_fp8.images()[1], hosts) > 2 * QUANTISED, "the host heeds it"
    assert run.is_compiled() and shared.builds() == built
    notes = shared.engine.report(run.ours)["notes"]
    assert any("asks for full precision" in note for note in notes), notes


# --- formats mixed --------------------------------------------------------------------------------


def by_turns() -> Callable[[str], str]:
    """Say which format a layer has: each one that is asked about has the next."""
    forms = itertools.cycle(FORMATS)
    return lambda name: next(forms)


def test_a_file_of_all_formats_runs_the_graphs_of_one(host: Host, shared: Lab) -> None:
    shared.compiled(flux("int8"))
    built = shared.builds()
    run = Flux(host, shared, flux(by_turns()))
    layers = [
        layer
        for layer in run.plain.model.diffusion_model.modules()
        if getattr(layer, "quant_format", None)
    ]
    found = {layer.quant_format for layer in layers}
    assert found == {form.marks["format"] for form in FORMATS.values()}
    rotated = [getattr(layer.weight._params, "convrot", None) for layer in layers]
    assert {True, False} <= set(rotated) and any(hasattr(layer, "input_scale") for layer in layers)
    for tokens, size in ((13, (8, 8)), (300, (9, 11))):
        ours, hosts = run.images(tokens, *size)
        assert hosts.isfinite().all() and relative(ours, hosts) < QUANTISED
    assert run.is_compiled() and shared.builds() == built


# --- every format in blocks of each sort ----------------------------------------------------------


class Sizes(NamedTuple):
    """What a call is made of: a latent's sides, how many images, tokens of text."""

    height: int
    width: int
    batch: int = 1
    tokens: int = 13
    frames: int = 1


SIZES = (
    Sizes(8, 8),
    Sizes(8, 8, batch=4),
    Sizes(9, 11, frames=3),
    Sizes(12, 10, batch=2, tokens=300),
)


class Model:
    """A small quantised model under a probe, with Compile Model inside the probe."""

    def __init__(self, host: Host, lab: Lab, kind: str, model: Any, layer: str) -> None:
        self.host, self.lab, self.kind = host, lab, kind
        self.key = f"diffusion_model.{layer}.weight"
        self.probe = Probe()
        self.ours = lab.compiled(self.probe.attach(model))
        weight = model.model.diffusion_model.get_submodule(layer).weight
        generator = torch.Generator().manual_seed(9)
        self.lora = 0.1 * torch.randn(weight.shape, generator=generator)

    def conditioning(self, tokens: int, seed: int) -> Any:
        if self.kind != "narrow15":
            return transformers.conditioning(self.kind, tokens, seed=seed)
        text = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(seed))
        return [[text, {}]]

    def latent(self, sizes: Sizes) -> Any:
        if self.kind == "narrow15":
            return {"samples": torch.zeros(sizes.batch, 4, sizes.height, sizes.width)}
        height, width, batch, _, frames = sizes
        return transformers.latent(self.kind, height, width, batch=batch, frames=frames)

    def sample(self, sizes: Sizes, strength: float | None = None) -> torch.Tensor:
        """One step; each call is compared with the host's on the same weights."""
        model = self.ours
        if strength is not None:
            model = model.clone()
            assert model.add_patches({self.key: ("diff", (self.lora,))}, strength) == [self.key]
        positive, negative = (self.conditioning(sizes.tokens, seed) for seed in (1, 2))
        options = {"latent": self.latent(sizes), "steps": 1, "cfg": 3.0}
        image: torch.Tensor = self.host.sample(model, positive, negative, **options)
        assert image.isfinite().all()
        return image

    def check(self, tolerance: float) -> None:
        """Every size and strength was all compiled and the host's within tolerance; no build."""
        built = self.lab.builds()
        before, *_ = (self.sample(sizes) for sizes in SIZES)
        changed = [self.sample(SIZES[0], strength) for strength in (1.0, 0.5)]
        assert torch.equal(self.sample(SIZES[0]), before), "the LoRA is off"
        assert max(call.error for call in self.probe.calls) < tolerance
        assert relative(changed[0], before) > 2 * tolerance
        assert relative(changed[0], changed[1]) > tolerance < relative(changed[1], before)
        report = self.lab.engine.report(self.ours)
        assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
        assert report["calls"]["compiled"] > 0 and self.lab.builds() == built
        assert len({call.shape[0] for call in self.probe.calls}) >= 3
        assert max(call.tokens for call in self.probe.calls) >= 300


#: The layer that a LoRA changes.
BLOCKS = {"zimage": "layers.1.feed_forward.w1", "wan": "blocks.1.ffn.0"}


@pytest.mark.slow
@pytest.mark.parametrize("form", list(FORMATS))
@pytest.mark.parametrize("kind", list(BLOCKS))
def test_every_format_in_every_size_with_a_lora(
    host: Host, shared: Lab, kind: str, form: str
) -> None:
    shared.compiled(transformers.load_quantised(kind, "int8"))
    built = shared.builds()
    model = transformers.load_quantised(kind, form)
    layer = model.model.diffusion_model.get_submodule(BLOCKS[kind])
    assert layer.quant_format == FORMATS[form].marks["format"]
    coarse = 6 if form == "convrot_w4a4" else 3  # inputs of four bits go by the last bit, too
    Model(host, shared, kind, model, BLOCKS[kind]).check(coarse * QUANTISED)
    assert shared.builds() == built, "the graphs of another format"


def is_of_a_transformer_block(name: str, weight: torch.Tensor) -> bool:
    """As files of UNets have it: convolutions keep their precision."""
    return ".transformer_blocks." in name and name.endswith("weight") and weight.dim() == 2


def unet(host: Host, form: str) -> Any:
    """A MODEL of an SD1.5 file whose UNet has quantised layers, by the host's loader."""
    name = f"narrow15-{form}.safetensors"
    file = quantised(checkpoints.make("narrow15"), form, takes=is_of_a_transformer_block)
    checkpoints.write(file, host.base / "models" / "checkpoints" / name)
    return host.nodes.CheckpointLoaderSimple().load_checkpoint(name)[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "fp8_e4m3fn", "fp8_e5m2", "mxfp8"])
def test_every_format_of_a_unet_in_every_size_with_a_lora(
    host: Host, shared: Lab, form: str
) -> None:
    shared.compiled(unet(host, "int8"))
    built = shared.builds()
    model = unet(host, form)
    layer = "middle_block.1.transformer_blocks.0.attn1.to_q"
    assert (
        model.model.diffusion_model.get_submodule(layer).quant_format
        == FORMATS[form].marks["format"]
    )
    Model(host, shared, "narrow15", model, layer).check(QUANTISED)
    assert shared.builds() == built, "the graphs of another format"


# --- damaged files --------------------------------------------------------------------------------


def outcome(run: Flux, model: Any) -> tuple[str, str] | torch.Tensor:
    """An image, or what was raised."""
    prompt, latent = transformers.conditioning("flux1", 13), transformers.latent("flux1", 8, 8)
    try:
        (image,) = sampled(run.host, [model], prompt, latent)
    except Exception as error:  # whatever it is
        return type(error).__name__, str(error)
    return image


def assert_as_the_host(run: Flux) -> tuple[str, str] | torch.Tensor:
    """Twice; returns what the host gave."""
    for _ in range(2):
        hosts, ours = outcome(run, run.plain), outcome(run, run.ours)
        if isinstance(hosts, tuple) or isinstance(ours, tuple):
            assert ours == hosts
        else:
            assert torch.equal(ours.isnan(), hosts.isnan())
            assert hosts.isnan().any() or relative(ours, hosts) < QUANTISED
    report = run.lab.engine.report(run.ours)
    assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
    return hosts


GROUPS = [
    (form, size) for form in ("int8_convrot", "convrot_w4a4") for size in (0, 16, 64, 128, 1024)
]


@pytest.mark.parametrize(("form", "size"), GROUPS)
def test_another_size_of_groups_gives_what_the_host_gives(
    host: Host, shared: Lab, form: str, size: int
) -> None:
    good = Flux(host, shared, flux(form))
    built = shared.builds()
    run = Flux(host, shared, flux(form, lambda file: mark(file, LAYER, convrot_groupsize=size)))
    hosts = assert_as_the_host(run)
    ours, right = good.images()
    assert relative(ours, right) < QUANTISED
    assert isinstance(hosts, tuple) or relative(hosts, right) > 2 * QUANTISED
    assert shared.builds() == built


def halved(axis: int) -> Callable[[File], None]:
    """Keep every second of a layer's scales along an axis, as for blocks of twice the size."""

    def change(file: File) -> None:
        name = f"{LAYER}.weight_scale"
        kept = torch.arange(0, file[name].shape[axis], 2)
        stored = file[name].view(torch.uint8) if file[name].element_size() == 1 else file[name]
        file[name] = stored.index_select(axis, kept).view(file[name].dtype)

    return change


HALVED = [("int8_convrot", 0), ("convrot_w4a4", 0), ("mxfp8", 0), ("mxfp8", -1), ("nvfp4", -1)]


@pytest.mark.parametrize(("form", "axis"), HALVED)
def test_half_of_the_scales_give_what_the_host_gives(
    host: Host, shared: Lab, form: str, axis: int
) -> None:
    good = Flux(host, shared, flux(form))
    built = shared.builds()
    assert_as_the_host(Flux(host, shared, flux(form, halved(axis))))
    ours, right = good.images()
    assert relative(ours, right) < QUANTISED and shared.builds() == built


def without_a_number(file: File) -> None:
    """Make one scale of a layer no number, as its dtype says it."""
    scale = file[f"{LAYER}.weight_scale"]
    if scale.element_size() == 1:
        e8m0 = json.loads(bytes(file[f"{LAYER}.comfy_quant"].tolist()))["format"] == "mxfp8"
        scale.view(torch.uint8).reshape(-1)[0] = 0xFF if e8m0 else 0x7F
    else:
        scale.reshape(-1)[0] = torch.nan


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_scale_that_is_no_number_gives_the_hosts_image(
    host: Host, shared: Lab, form: str
) -> None:
    shared.compiled(flux("int8"))
    built = shared.builds()
    hosts = assert_as_the_host(Flux(host, shared, flux(form, without_a_number)))
    assert isinstance(hosts, torch.Tensor) and hosts.isnan().any()
    ours, right = Flux(host, shared, flux(form)).images()
    assert relative(ours, right) < QUANTISED and shared.builds() == built


# --- dynamic VRAM ---------------------------------------------------------------------------------


class Pages(Memory):
    """Of all layers of a model; counts how often one asks for its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bytes = torch.zeros(size, dtype=torch.uint8)
        self.asked = 0

    def fault(self, address: int, size: int) -> Any:
        self.asked += 1
        return super().fault(address, size)


class Added:
    """What the host hangs on a layer under a LoRA: it changes the weight once, where that lies."""

    is_lowvram_patch = True

    def __init__(self) -> None:
        self.calls = 0

    def memory_required(self) -> int:
        return 64

    def prepare(self, *_: Any, **__: Any) -> None:
        pass

    def clear_prepared(self) -> None:
        pass

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 1.5 * weight


def elsewhere(weight: Any) -> Any:
    """The same quantised weight, said to lie on a GPU: its numbers are where they were."""
    made = torch.Tensor._make_wrapper_subclass(
        type(weight), weight.shape, device="cuda:0", dtype=weight.dtype
    )
    type(weight).__init__(made, weight._qdata, weight._layout_cls, weight._params)
    return made


class Paged:
    """The quantised layers of a model, whose weights the host brings to pages at each call."""

    def __init__(self, model: Any) -> None:
        from comfy import memory_management

        self.layers = [
            layer
            for layer in model.model.diffusion_model.modules()
            if getattr(layer, "quant_format", None)
        ]
        sizes = [
            memory_management.vram_aligned_size([layer.weight, layer.bias]) for layer in self.layers
        ]
        self.pages = Pages(sum(sizes))
        start = 0
        for layer, size in zip(self.layers, sizes, strict=True):
            layer._v, layer.seed_key = (self.pages, start, size), f"at {start}"
            layer._parameters["weight"] = elsewhere(layer.weight)
            start += size
        self.empty()

    def empty(self) -> None:
        """As after others needed the room."""
        for layer in self.layers:
            layer._v_signature = None

    def sample(self, run: Flux, model: Any) -> torch.Tensor:
        """Two steps: each layer asks for its pages once in each, and lets them go."""
        self.pages.asked = 0
        image = outcome(run, model)
        assert isinstance(image, torch.Tensor), image
        assert self.pages.asked == 2 * len(self.layers) and self.pages.pins == 0
        return image


@pytest.fixture
def pages_of_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host's own functions for dynamic VRAM work in main memory."""
    import comfy.model_management
    import comfy.pinned_memory
    import comfy_aimdo.torch

    def tensor(place: Any, device: torch.device) -> torch.Tensor:
        part: torch.Tensor = place[0].bytes[place[1] : place[1] + place[2]]
        return part

    monkeypatch.setattr(comfy_aimdo.torch, "aimdo_to_tensor", tensor)
    monkeypatch.setattr(comfy.pinned_memory, "get_pin", lambda *_, **__: None)
    monkeypatch.setattr(comfy.pinned_memory, "pin_memory", lambda *_, **__: False)
    monkeypatch.setattr(comfy.model_management, "is_device_cpu", lambda _: False)


@pytest.mark.usefixtures("pages_of_main_memory")
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
    found = []
    for lora in (None, Added(), None):
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
