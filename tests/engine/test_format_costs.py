"""What a compressed format costs, by which a quantised block is compared with the host's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.host_api.layers import multiplying_in_full
from warmgraph_backends.kinds.tolerance import RELATIVE_L2, Judgement
from warmgraph_backends.runtime import verifier
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.quantised import FORMATS

from .lab import Lab, relative
from .quantised_runs import LAYER, QUANTISED, Flux, flux


@pytest.mark.usefixtures("multiplies_fp8")
@pytest.mark.parametrize("form", [*FORMATS, transformers.FAST])
def test_what_a_format_costs_is_known_by_the_same_layer_in_full(host: Host, form: str) -> None:
    model = transformers.load_quantised("flux1", form)
    layer = model.model.diffusion_model.get_submodule(LAYER)
    dtype = model.model.get_dtype_inference()
    x = torch.randn(1, 7, layer.in_features, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.inference_mode():
        before = layer(x.clone())
        with multiplying_in_full(model.model.diffusion_model):
            full = layer(x.clone())
        weight = layer.weight.dequantize() if layer.weight.dtype is dtype else layer.weight
        plain = torch.nn.functional.linear(x, weight.to(dtype), layer.bias.to(dtype))
        assert relative(full, plain) < 1e-5, "by what the weights stand for"
        assert torch.equal(layer(x.clone()), before), "as it was"
    is_unpacked = form in ("mxfp8", "nvfp4")  # no product on this device
    assert is_unpacked == (relative(before, full) < 1e-5)


@pytest.mark.slow  # graphs of its own
@pytest.mark.usefixtures("multiplies_fp8")
def test_a_graph_in_float16_may_differ_by_what_its_format_costs(
    host: Host, shared: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is more than float16 does: an input between two numbers of fp8 goes to either."""
    from comfy import model_management

    monkeypatch.setattr(model_management, "unet_dtype", lambda **_: torch.float16)
    monkeypatch.setattr(model_management, "unet_manual_cast", lambda *_, **__: None)
    run = Flux(host, shared, flux("fp8_e4m3fn"))
    assert run.plain.model.get_dtype_inference() is torch.float16
    found: list[Judgement] = []
    own = verifier.judge

    def noted(*args: Any, **named: Any) -> Judgement:
        found.append(own(*args, **named))
        return found[-1]

    monkeypatch.setattr(verifier, "judge", noted)
    ours, hosts = run.images()
    assert run.is_compiled() and run.rounded() == [10, 3, 0]
    assert hosts.isfinite().all() and relative(ours, hosts) < 4 * QUANTISED
    assert any(each.error > RELATIVE_L2["float16"] for each in found)
