"""Quantised files run compiled: the host's own products, our graphs around them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import FORMATS

from .lab import Lab, relative

#: An input in the middle between two numbers of a format goes to one or the other by its last bit.
QUANTISED = 2e-3


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One engine for all formats: its workers start once."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.engine.close()


@pytest.mark.parametrize("form", FORMATS)
def test_quantised_blocks_are_compiled_around_the_hosts_own_products(
    host: Host, shared: Lab, form: str
) -> None:
    model = transformers.load_quantised("flux1", form)
    jobs = shared.jobs()
    compiled = shared.compiled(model)
    assert shared.jobs() - jobs <= 3
    report = shared.engine.report(compiled)
    assert report["regions"] == {"total": 5, "compiled": 5, "eager": 0}, report["eager"]
    for height, width, batch, tokens in ((8, 8, 1, 13), (12, 10, 2, 5)):
        prompt = transformers.conditioning("flux1", tokens)
        latent = transformers.latent("flux1", height, width, batch=batch)
        eager, ours = (
            host.sample(each, prompt, prompt, latent=latent, steps=2, cfg=1.0)
            for each in (model, compiled)
        )
        assert eager.isfinite().all() and relative(ours, eager) < QUANTISED
    report = shared.engine.report(compiled)
    assert report["calls"]["compiled"] == 4 * 5 and report["regions"]["eager"] == 0, report["eager"]
    words = f"products run as without this node (quantised, {FORMATS[form].marks['format']})"
    assert any(words in note for note in report["notes"]), report["notes"]

    key = "diffusion_model.double_blocks.1.img_mlp.0.weight"
    clone = compiled.clone()
    delta = torch.randn(1024, 256, generator=torch.Generator().manual_seed(9))
    assert clone.add_patches({key: ("diff", (0.05 * delta,))}) == [key]
    plain = model.clone()
    plain.add_patches({key: ("diff", (0.05 * delta,))})
    jobs = shared.jobs()
    with_lora, without, theirs = (
        host.sample(each, prompt, prompt, latent=latent, steps=2, cfg=1.0)
        for each in (clone, compiled, plain)
    )
    assert relative(with_lora, theirs) < 2 * QUANTISED < relative(with_lora, without)
    assert shared.jobs() == jobs and shared.engine.report(clone)["calls"]["eager"] == 0


def test_layers_of_several_formats_share_the_graphs_of_one(host: Host, shared: Lab) -> None:
    """Files mix them: what a card is good at, and full precision where it counts."""

    def mixed(name: str) -> str:
        return "fp8_e4m3fn" if "mlp" in name else "int8_convrot"

    model = transformers.load_quantised("flux1", mixed)
    shared.compiled(transformers.load_quantised("flux1", "int8"))
    jobs = shared.jobs()
    compiled = shared.compiled(model)
    prompt = transformers.conditioning("flux1", 13)
    latent = transformers.latent("flux1", 8, 8)
    eager, ours = (
        host.sample(each, prompt, prompt, latent=latent, steps=2, cfg=1.0)
        for each in (model, compiled)
    )
    assert relative(ours, eager) < QUANTISED and shared.jobs() == jobs
    report = shared.engine.report(compiled)
    assert report["calls"] == {**report["calls"], "compiled": 2 * 5, "eager": 0}, report["eager"]
    products = "{} products run as without this node ({}); what lies around them is compiled"
    assert report["notes"][-3:] == [
        products.format(18, "quantised, int8_tensorwise"),
        products.format(8, "quantised, float8_e4m3fn"),
        products.format(2, "plain weights in a quantised file"),
    ]


@pytest.mark.parametrize("form", ["int8_convrot", "fp8_e4m3fn"])
def test_quantised_blocks_of_a_video_model(host: Host, shared: Lab, form: str) -> None:
    model = transformers.load_quantised("wan", form)
    compiled = shared.compiled(model)
    prompt = transformers.conditioning("wan", 13)
    for height, width, frames in ((8, 8, 1), (6, 10, 3)):
        latent = transformers.latent("wan", height, width, frames=frames)
        eager, ours = (
            host.sample(each, prompt, prompt, latent=latent, steps=2, cfg=1.0)
            for each in (model, compiled)
        )
        assert eager.isfinite().all() and relative(ours, eager) < QUANTISED
    report = shared.engine.report(compiled)
    assert report["calls"] == {**report["calls"], "compiled": 4 * 3, "eager": 0}, report["eager"]
