"""What a captured place cannot hold: products of some formats, and layers with others' code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import FORMATS

from .lab import Lab, relative
from .quantised_runs import LAYER, QUANTISED, Flux
from .recorded_graphs import cuts

OTHERS = "another node's code runs between what is replayed"
FETCHES = "a layer that fetches its own weights runs between what is replayed"
STEPS = 2
#: Formats whose products may be captured, by weights that come with the region's.
WHOLE = ("int8", "int8_convrot", "fp8_e4m3fn", "fp8_e4m3fn_inputs")


#: Those of fp8, whose models take a minute each to build, in `--all` alone.
FORMS = [
    pytest.param(form, marks=[pytest.mark.slow] if form.startswith("fp8") else [])
    for form in FORMATS
]


@pytest.mark.usefixtures("multiplies_fp8")
@pytest.mark.parametrize("form", FORMS)
def test_products_of_a_format_lie_in_a_piece_or_say_why_not(
    host: Host, shared: Lab, form: str
) -> None:
    run = Flux(host, shared, transformers.load_quantised("flux1", form))
    run.sample(run.ours)
    found = cuts(lambda: run.sample(run.ours))
    assert found == ({} if form in WHOLE else {FETCHES: STEPS * 26})


@pytest.mark.usefixtures("multiplies_fp8")
def test_a_lora_at_each_call_and_another_packs_layer_cut_where_they_are(
    host: Host, shared: Lab
) -> None:
    """As `LoraLoaderBypass` puts them: a forward of its own in a layer's place."""
    run = Flux(host, shared, transformers.load_quantised("flux1", "fp8_e4m3fn"))
    run.sample(run.ours)
    layer: Any = run.plain.model.diffusion_model.get_submodule(LAYER)
    own = layer.forward

    def beside(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = own(x) + 0.01 * x.mean()
        return result

    layer.forward = beside
    try:
        run.sample(run.ours)  # which asks for a graph that calls the layer
        shared.wait_until(lambda: shared.is_settled(run.ours))
        ours, hosts = run.images()
        found = cuts(lambda: run.sample(run.ours))
    finally:
        del layer.forward
    assert relative(ours, hosts) <= QUANTISED
    assert found[OTHERS] == STEPS, found
