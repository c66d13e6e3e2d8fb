"""Quantised files as they are found: old ones, flags of single layers, formats mixed, damaged."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import FORMATS, quantised

from .lab import Lab, relative
from .quantised_runs import LAYER, QUANTISED, File, Flux, flux, layers_of
from .rows import some_rows


def mark(file: File, layer: str, **marks: Any) -> None:
    """Change what a file says of a layer."""
    name = f"{layer}.comfy_quant"
    said = json.loads(bytes(file[name].tolist()))
    file[name] = torch.tensor(list(json.dumps({**said, **marks}).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("form", list(FORMATS))
def test_the_host_can_read_a_file_of_each_format(host: Host, form: str) -> None:
    """With dynamic VRAM it does so by itself, and knows fewer types than PyTorch."""
    import comfy.utils

    file = quantised({"double_blocks.0.w.weight": torch.randn(256, 256)}, form)
    assert len(file) >= 3
    assert {part.dtype for part in file.values()} <= {*comfy.utils._TYPES.values()}


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


@pytest.mark.parametrize("facts", some_rows(OLD, [(0, None), (2, 0.02)]), ids=str)
def test_an_old_file_of_scaled_fp8_runs_the_graphs_of_a_new_one(
    host: Host, shared: Lab, facts: tuple[int, float | None]
) -> None:
    marker, input_scale = facts
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
SOME = [form if form in FEW else pytest.param(form, marks=pytest.mark.slow) for form in FORMATS]


@pytest.mark.parametrize("only", ["", "_mlp."])
@pytest.mark.parametrize("form", SOME)
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


# --- damaged files --------------------------------------------------------------------------------


def test_a_scale_that_is_no_number_gives_the_hosts_image_and_no_graph_the_blame(
    host: Host, shared: Lab
) -> None:
    """Either is no image, of which nothing can be said; the graphs stay what they are."""
    built = shared.builds()
    run = Flux(
        host, shared, flux("int8", lambda file: file[f"{LAYER}.weight_scale"].fill_(torch.nan))
    )
    ours, eager = run.images()
    assert torch.equal(ours.isnan(), eager.isnan()) and eager.isnan().any()
    good = Flux(host, shared, transformers.load_quantised("flux1", "int8"))
    assert relative(*good.images()) < QUANTISED
    for model in (run.ours, good.ours):
        report = shared.engine.report(model)
        assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]
    assert shared.builds() - built <= 3


@pytest.mark.parametrize("form", ["mxfp8", "int8_convrot"])
def test_a_scale_that_is_cut_off_raises_what_the_host_raises(
    host: Host, shared: Lab, form: str
) -> None:
    def cut(file: dict[str, torch.Tensor]) -> None:
        name = f"{LAYER}.weight_scale"
        file[name] = file[name][: len(file[name]) // 2].clone()

    run = Flux(host, shared, flux(form, cut))
    for _ in range(2):
        raised = []
        for model in (run.plain, run.ours):
            with pytest.raises(Exception) as caught:  # whatever it is
                run.sample(model)
            raised.append((type(caught.value), str(caught.value)))
        assert raised[0] == raised[1]
    good = Flux(host, shared, transformers.load_quantised("flux1", form))
    assert relative(*good.images()) < QUANTISED
    for model in (run.ours, good.ours):
        report = shared.engine.report(model)
        assert report["regions"]["eager"] == report["calls"]["eager"] == 0, report["eager"]


def test_a_format_that_the_host_does_not_know_is_its_loaders_to_refuse(shared: Lab) -> None:
    with pytest.raises(KeyError, match="int3_of_tomorrow"):
        flux("int8", lambda file: mark(file, LAYER, format="int3_of_tomorrow"))


def outcome(run: Flux, model: Any) -> tuple[str, str] | torch.Tensor:
    """An image, or what was raised."""
    try:
        return run.sample(model)
    except Exception as error:  # whatever it is
        return type(error).__name__, str(error)


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
    *(("int8_convrot", 0), ("int8_convrot", 64), ("convrot_w4a4", 16)),
    *(pytest.param("int8_convrot", size, marks=pytest.mark.slow) for size in (16, 128, 1024)),
    *(pytest.param("convrot_w4a4", size, marks=pytest.mark.slow) for size in (0, 64, 128, 1024)),
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


@pytest.mark.parametrize("which", some_rows(HALVED, [HALVED[0], HALVED[-1]]), ids=str)
def test_half_of_the_scales_give_what_the_host_gives(
    host: Host, shared: Lab, which: tuple[str, int]
) -> None:
    form, axis = which
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


@pytest.mark.parametrize("form", SOME)
def test_a_scale_that_is_no_number_gives_the_hosts_image(
    host: Host, shared: Lab, form: str
) -> None:
    shared.compiled(flux("int8"))
    built = shared.builds()
    hosts = assert_as_the_host(Flux(host, shared, flux(form, without_a_number)))
    assert isinstance(hosts, torch.Tensor) and hosts.isnan().any()
    ours, right = Flux(host, shared, flux(form)).images()
    assert relative(ours, right) < QUANTISED and shared.builds() == built
