"""A LoRA acts as without us in every form, with the graphs that there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from warmgraph_backends.host_api import layers
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .others import REPLACED, Model, called, lora_of, products
from .quantised_runs import QUANTISED
from .subject import reasons
from .test_model_kinds import evaluate

BFLOAT16 = 3e-2
SMALL = 0.2  # of a LoRA: rounding the inputs of larger weights costs half of the image

Form = Callable[[Host, Any, "tuple[str, str]"], Any]


def loaded(node: str, strength: float, which: int = 0) -> Form:
    """What a loader of the host makes of a MODEL."""
    more = {} if node.endswith("ModelOnly") else {"clip": None, "strength_clip": 0.0}

    def form(host: Host, model: Any, names: tuple[str, str]) -> Any:
        given = {"lora_name": names[which], "strength_model": strength, **more}
        return host.node(node, model=model, **given)[0]

    return form


def stacked(*forms: Form) -> Form:
    def form(host: Host, model: Any, names: tuple[str, str]) -> Any:
        for each in forms:
            model = each(host, model, names)
        return model

    return form


def switched(inner: Form) -> Form:
    def form(host: Host, model: Any, names: tuple[str, str]) -> Any:
        ways = {"on_true": inner(host, model, names), "on_false": model}
        return host.node("ComfySwitchNode", switch=True, **ways)[0]

    return form


ONLY, BYPASS = "LoraLoaderModelOnly", "LoraLoaderBypassModelOnly"
FORMS: dict[str, Form] = {
    "loader": loaded("LoraLoader", 0.8),
    "model only": loaded(ONLY, -0.6),
    "bypass": loaded("LoraLoaderBypass", 0.8),
    "bypass model only": loaded(BYPASS, 1.2),
    "two": stacked(loaded(ONLY, 0.7), loaded(ONLY, 0.4, 1)),
    "two in bypass mode": stacked(loaded(BYPASS, 0.7), loaded(BYPASS, 0.4, 1)),
    "one at load, one in bypass mode": stacked(loaded(ONLY, 0.7), loaded(BYPASS, 0.4, 1)),
    "behind a switch": switched(loaded(ONLY, 0.7)),
    "in bypass mode behind a switch": switched(loaded(BYPASS, 0.7)),
}


def files(host: Host, model: Model, name: str, scale: float = 1.0) -> tuple[str, str]:
    """Two files: a LoRA of all products of all blocks, and one of a few."""
    folder = Path(host.folder_paths.get_folder_paths("loras")[0])
    folder.mkdir(parents=True, exist_ok=True)
    every = products(model.plain)
    for number, names in enumerate((every, every[1::3])):
        lora = lora_of(model.plain, names, seed=number, scale=scale)
        save_file(lora, folder / f"{name}-{number}.safetensors")
    return f"{name}-0.safetensors", f"{name}-1.safetensors"


def all_forms(
    host: Host,
    model: Model,
    name: str,
    tolerance: float,
    scale: float = 1.0,
    exact: Model | None = None,
) -> None:
    """Every form, behind and before Compile Model: the image as without it, and one set of graphs
    for those that replace what layers do, whichever they are.

    Args:
        exact: the same weights in float32, of a model that rounds all that it computes.
    """
    names, lab = files(host, model, name, scale), model.lab
    twin = exact or model

    def check(what: str, form: Form, plain: torch.Tensor | None = None) -> None:
        eager = model.sample(form(host, model.plain, names))
        with layers.multiplying_in_full(twin.plain.model):
            full = twin.sample(form(host, twin.plain, names))
        # What rounding costs eager, of inputs alone or, where all is rounded, for each of the two.
        most = max(tolerance, relative(full, eager) * (2 if exact else 0.5))
        if plain is not None:
            effect = relative(eager, plain)
            assert effect > 2 * tolerance, f"{what} did nothing"
            most = min(most, effect / 2)
        ahead = lab.compiled(form(host, model.plain, names))
        for ours in (form(host, model.compiled, names), ahead):
            error = relative(model.sample(ours), full if exact else eager)
            assert error < most, (what, error)
            assert reasons(model.report(ours)) == {}, what
            assert (called(model.report(ours)).get(REPLACED, 0) > 0) == ("bypass" in what), what

    first = FORMS["bypass"](host, model.compiled, names)
    model.sample(first)
    model.settled(first)
    jobs, plain = lab.jobs(), model.sample(model.plain)
    for what, form in FORMS.items():
        check(what, form, plain)
    check("none", lambda _, given, __: given)
    assert lab.jobs() == jobs


def test_every_form_of_a_lora(host: Host, shared: Lab) -> None:
    all_forms(host, Model(host, shared, "zimage"), "zimage", TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("zimage", torch.bfloat16),
        ("zimage", "int8_convrot"),
        ("zimage", "fp8_e4m3fn"),
        ("krea", torch.float32),
        ("krea", torch.bfloat16),
        ("krea", "int8"),
        ("krea", "fp8_e4m3fn"),
        ("wan", torch.float32),
        ("wan", "int8"),
        ("wan", "fp8_e4m3fn"),
        ("flux1", torch.float32),
    ],
)
def test_every_form_of_a_lora_in_other_models(
    host: Host, shared: Lab, kind: str, form: Any
) -> None:
    scale, exact, tolerance = SMALL, None, 4 * QUANTISED
    if isinstance(form, str):
        plain = transformers.load_quantised(kind, form)
    elif form is torch.bfloat16:
        plain, tolerance = transformers.load(kind, dtype=form), BFLOAT16
        file = {key: value.float() for key, value in transformers.weights(kind, dtype=form).items()}
        same = transformers.load_file(kind, file, dtype=torch.float32)
        exact = Model(host, shared, kind, same, compiles=False)
    else:
        plain, scale, tolerance = transformers.load(kind, dtype=form), 1.0, TOLERANCE
    model = Model(host, shared, kind, plain)
    all_forms(host, model, f"{kind}-{form}", tolerance, scale, exact)


def test_a_hooked_loras_strength_is_that_of_this_run(host: Host, shared: Lab) -> None:
    """As after a fresh start, whatever ran before."""

    def run(model: Model, strength: float) -> torch.Tensor:
        (hooks,) = host.node("CreateHookLoraModelOnly", lora_name=name, strength_model=strength)
        (keyframe,) = host.node("CreateHookKeyframe", strength_mult=0.5, start_percent=0.5)
        (hooks,) = host.node("SetHookKeyframes", hooks=hooks, hook_kf=keyframe)
        return model.sample(model.compiled if ours else model.plain, steps=3, hooks=hooks)

    first = Model(host, shared, "zimage")
    name, _ = files(host, first, "hooked")
    results = {}
    for ours in (False, True):
        model = Model(host, shared, "zimage")
        results[ours] = [run(model, strength) for strength in (0.4, 0.7, 0.4)]
        results[ours].append(run(Model(host, shared, "zimage"), 0.7))
        weak, strong, again, fresh = results[ours]
        assert torch.equal(weak, again) and torch.equal(strong, fresh)
        assert relative(weak, strong) > 1e-3
    jobs = shared.jobs()
    for eager, compiled in zip(results[False], results[True], strict=True):
        assert relative(compiled, eager) < TOLERANCE
    assert reasons(model.report(model.compiled)) == {} and shared.jobs() == jobs


@pytest.mark.parametrize("form", ["model only", "one at load, one in bypass mode"])
def test_a_lora_computed_at_each_call(host: Host, shared: Lab, form: str) -> None:
    """As over a model of which nothing fits."""
    import comfy.model_management as management

    model = Model(host, shared, "zimage")
    names = files(host, model, "streamed")
    generator = torch.Generator().manual_seed(6)
    given = {
        "x": torch.randn(1, 16, 8, 8, generator=generator),
        "t": torch.full((1,), 0.5),
        "c_crossattn": torch.randn(1, 13, 64, generator=generator),
        "num_tokens": 13,
    }
    ready = FORMS["bypass"](host, model.compiled, names)
    model.sample(ready)
    model.settled(ready)
    plain, jobs = evaluate(model.plain, **given), shared.jobs()
    results = []
    for each in (model.plain, model.compiled):
        lora = FORMS[form](host, each, names)
        management.unload_all_models()
        lora.patch_model(lora.load_device, lowvram_model_memory=1)  # nothing fits
        layers = [m for m in lora.model.modules() if hasattr(m, "weight_function")]
        assert any(layer.weight_function for layer in layers)
        results.append(evaluate(lora, load=False, **given))
        lora.detach()
    eager, ours = results
    assert relative(eager, plain) > 1e-3
    assert relative(ours, eager) < TOLERANCE and shared.jobs() == jobs
    report = model.report(lora)
    assert reasons(report) == {}
    assert (called(report).get(REPLACED, 0) > 0) == ("bypass" in form)
