"""What the host's code sees of a layer that a graph leaves to the host: its helpers call it whole,
and what it does not know ends the build by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.contract import InputSpec, Program, RegionSpec, Symbol
from warmgraph_backends.errors import BuildError
from warmgraph_backends.operators import host_layer
from warmgraph_backends.plans.plan import Form
from warmgraph_backends.plans.region_code import RegionCode
from warmgraph_backends.worker.export import export
from warmgraph_tools.inprocess import Host

WIDTH = 16


class Asking(Form):
    """A feed-forward whose last product goes through a helper."""

    family, name = "made-up", "asking"

    def __init__(self, helper: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        self.helper = helper

    def reference(self, module: Any, *inputs: Any) -> torch.Tensor:
        return self.helper(module.w2, inputs[0])


def exported(helper: Callable[[Any, torch.Tensor], torch.Tensor]) -> Program:
    layer = torch.nn.Linear(WIDTH, WIDTH)
    left = host_layer.describe("w2", layer)
    assert left is not None
    spec = RegionSpec(
        family=Asking.family,
        form=Asking.name,
        label="a feed-forward",
        module={
            "class": "comfy.ldm.lumina.model:FeedForward",
            "attributes": {},
            "parameters": {},
            "modules": [["w2", left]],
        },
        inputs=(InputSpec("x", "float32", ("tokens", WIDTH)),),
        symbols=(Symbol("tokens", 1, 64, 8),),
        sources={},
        device="cpu",
        layout="contiguous",
        packs=(),
    )
    return export(RegionCode(spec, Asking(helper)))


def calls(program: Program) -> int:
    return sum(node.target is host_layer.OPERATOR for node in program.graph_module.graph.nodes)


def through_the_hosts(layer: Any, x: torch.Tensor) -> torch.Tensor:
    import comfy.ops

    result: torch.Tensor = comfy.ops.linear_input_act(layer, torch.cat((x, x), -1), "swiglu")
    return result


def through_a_fused_kernel(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """As helpers in newer models are: one kernel where a weight of this format may be taken."""
    from comfy.quant_ops import QuantizedTensor

    taken = (
        isinstance(layer.weight, QuantizedTensor)
        and layer.weight._params.convrot
        and not layer._full_precision_mm
        and not getattr(layer, "comfy_force_cast_weights", False)
        and len(layer.weight_function) == 0
    )
    assert not taken
    return layer(torch.nn.functional.silu(x))  # type: ignore[no-any-return]


def where_it_may_be(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What is asked first differs; each question alone says that the layer is to be called."""
    taken = [
        getattr(layer, "layout_type", None) is not None,
        getattr(layer, "quant_format", None) is not None,
        not layer._full_precision_mm,
        not layer.comfy_force_cast_weights,
        isinstance(layer.weight, torch.Tensor),
        hasattr(layer, "_v"),
        getattr(layer, "_prefetch", None) is not None,
        getattr(layer, "pre_quant_scale", None) is not None,
        layer.bias is None and isinstance(layer.bias, torch.Tensor),
    ]
    assert not any(taken)
    return layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("helper", [through_the_hosts, through_a_fused_kernel, where_it_may_be])
def test_a_helper_that_looks_at_a_layer_calls_it(
    host: Host, helper: Callable[[Any, torch.Tensor], torch.Tensor]
) -> None:
    assert calls(exported(helper)) == 1


def by_default(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x) if getattr(layer, "weight_tiles", None) is None else x


@pytest.mark.parametrize(
    ("helper", "words"),
    [
        (lambda layer, x: x * layer.weight_tiles, "weight_tiles of w2"),
        (lambda layer, x: layer(x) if not hasattr(layer, "low_rank") else x, "low_rank of w2"),
        (by_default, "weight_tiles of w2"),
        (lambda layer, x: layer(x.to(layer.weight.dtype)), "dtype of the weight of w2"),
        (lambda layer, x: torch.nn.functional.linear(x, layer.weight), "the weight of w2"),
        (lambda layer, x: layer(x) + torch.zeros_like(layer.bias), "the bias of w2"),
        (lambda layer, x: layer.forward_comfy_cast_weights(x), "forward_comfy_cast_weights of w2"),
    ],
    ids=["read", "hasattr", "with a default", "of a weight", "a weight", "a bias", "a method"],
)
def test_what_no_graph_knows_of_a_layer_ends_its_build_by_name(
    host: Host, helper: Callable[[Any, torch.Tensor], torch.Tensor], words: str
) -> None:
    with pytest.raises(BuildError) as refused:
        exported(helper)
    known = f"this ComfyUI's code asks for {words}, which compiled code does not know"
    assert refused.value.reason == known
