"""Which products are added in place, and what is rounded once; `tests/gpu` runs both compiled."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from warmgraph_backends.contract import Program, RegionSpec
from warmgraph_backends.families.catalogue import code_of, plan_model
from warmgraph_backends.kernels import products, rounding
from warmgraph_backends.kinds.tolerance import relative_l2
from warmgraph_backends.operators.host_layer import HostLayer
from warmgraph_backends.plans.specs import describe_place
from warmgraph_backends.torch_api import compiling, loading, packing, tracing, turns
from warmgraph_backends.worker.export import export
from warmgraph_tools.inprocess import Host

aten = torch.ops.aten
linear = torch.nn.functional.linear


class _FeedForward(torch.nn.Module):
    """The end of a transformer block: an addend made here, a norm of it, two products."""

    def forward(self, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
        widen, widen_bias, narrow, narrow_bias = weights
        x = x + torch.tanh(x)
        normed = torch.nn.functional.layer_norm(x, x.shape[-1:])
        wide = torch.nn.functional.gelu(linear(normed, widen, widen_bias))
        return (linear(wide, narrow, narrow_bias) + x,)


def _compiled(graph_module: torch.fx.GraphModule) -> tuple[ModuleType, str]:
    """Compiled on the way that ours go, with one product added in place; and its source."""
    module, source = compiling.compile_wrapper(
        graph_module, compiling.CONFIG, last_pass=products.add_in_place
    )
    assert source.count("aten.addmm_.default(") == 1
    return module, source


def _weights() -> list[torch.Tensor]:
    return [torch.randn(size) / 8 for size in ((256, 64), (256,), (64, 256), (64,))]


def test_a_compiled_graph_adds_onto_its_own_sum_and_changes_no_input() -> None:
    rows = torch.export.Dim("rows", min=1, max=1024)
    inputs = (torch.randn(2, 16, 64), *_weights())
    with torch.no_grad(), tracing.size_oblivious():
        exported = torch.export.export(
            _FeedForward(), inputs, dynamic_shapes={"x": {1: rows}, "weights": 4 * (None,)}
        )
    payload, _ = packing.pack(*_compiled(exported.graph_module))
    call = loading.unpack(payload)
    for count in (16, 1, 33):
        tensors = [torch.randn(2, count, 64), *inputs[1:]]
        before = [tensor.clone() for tensor in tensors]
        [found] = call(list(tensors))
        torch.testing.assert_close(found, _FeedForward()(*tensors)[0])
        assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


def test_a_sum_is_compiled_in_place_on_a_machine_of_continuous_integration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `CI` set Inductor calls no operator that it could take apart, unless it is told to."""
    from torch._inductor.lowering import lowerings

    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled there yet
    monkeypatch.delitem(lowerings, aten.addmm_.default, raising=False)
    tensors = [torch.randn(2, 16, 64), *_weights()]
    graph_module = torch.export.export(_FeedForward(), tuple(tensors)).graph_module
    with monkeypatch.context() as patch, pytest.raises(Exception, match="a decomposition exists"):
        patch.setattr(compiling, "call_whole", lambda _: None)
        _compiled(copy.deepcopy(graph_module))
    module, _ = _compiled(graph_module)
    torch.testing.assert_close(module.call(list(tensors))[0], _FeedForward()(*tensors)[0])


class _ReturnsMore(torch.nn.Module):
    """A sum that becomes a result, and is read by another one that is computed later."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        x = x + 1
        return linear(torch.tanh(x), weight, bias) + x, linear(x, weight), x.shape[0] + x


@pytest.mark.parametrize("any_size", [True, False], ids=["any size", "one size"])
def test_the_sums_memory_stays_the_results(any_size: bool) -> None:
    size = {0: torch.export.Dim("rows", min=1, max=1024)} if any_size else None
    tensors = (torch.randn(6, 8), torch.randn(8, 8), torch.randn(8))
    with torch.no_grad(), tracing.size_oblivious():
        exported = torch.export.export(
            _ReturnsMore(), tensors, dynamic_shapes=(size, None, None), strict=False
        )
    module, _ = _compiled(exported.graph_module)
    torch.testing.assert_close(tuple(module.call(list(tensors))), _ReturnsMore()(*tensors))


def _traced(function: Callable[..., Any], *tensors: torch.Tensor) -> torch.fx.GraphModule:
    """The function as Inductor has it last: functional, each node with its value."""
    graph_module = make_fx(function, tracing_mode="fake")(*tensors)
    assert isinstance(graph_module, torch.fx.GraphModule)
    return graph_module


def _in_place(graph_module: torch.fx.GraphModule) -> int:
    products.add_in_place(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    return sum(node.target is aten.addmm_.default for node in graph_module.graph.nodes)


def _with_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    product = aten.addmm(bias, aten.view(x, [6, 8]), aten.permute(weight, [1, 0]))
    return (aten.add(aten.view(product, [2, 3, 4]), aten.add(x[..., :4], 1.0)),)


def _bias_apart(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    product = aten.mm(aten.view(x, [6, 8]), aten.permute(weight, [1, 0]))
    biased = aten.view(aten.add(product, bias), [2, 3, 4])
    return (aten.add(aten.add(x[..., :4], 1.0), biased),)


def _returned_flat(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    flat = aten.view(x, [6, 8])
    product = aten.addmm(bias, flat, aten.permute(weight, [1, 0]))
    return (aten.view(aten.add(aten.add(flat[:, :4], 1.0), product), [2, 3, 4]),)


@pytest.mark.parametrize("function", [_with_bias, _bias_apart, _returned_flat])
def test_a_product_is_added_in_place_in_each_form_that_inductor_has(function: Any) -> None:
    tensors = torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(4)
    graph_module = _traced(function, *tensors)
    assert _in_place(graph_module) == 1
    torch.testing.assert_close(graph_module(*tensors), function(*tensors))


def _onto_an_input(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return (aten.add(aten.addmm(bias, x, weight), x),)


def _used_twice(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    product = aten.addmm(bias, x, weight)
    return (aten.add(product, aten.add(x, 1.0)), product)


def _read_here(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return (aten.relu(aten.add(aten.addmm(bias, x, weight), aten.add(x, 1.0))),)


def _without_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return (aten.add(aten.mm(x, weight), aten.add(x, bias)),)


def _of_another_type(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return (aten.add(aten.addmm(bias, x, weight), aten.add(x.double(), 1.0)),)


def _broadcast(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return (aten.add(aten.addmm(bias, x, weight), aten.add(bias, 1.0)),)


def _of_one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return (aten.add(aten.addmm(bias, x[:1], weight), aten.add(x, 1.0)),)


def _rows_side_by_side(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    product = aten.view(aten.addmm(bias, x, weight), [20])
    return (aten.add(product, aten.add(aten.view(x, [20]), 1.0)),)


def _of_one_column(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return (aten.add(aten.add(aten.mm(x, weight[:, :1]), bias), aten.add(x, 1.0)),)


def _widened(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    product = aten.mm(x.half(), weight.half())
    return (aten.add(aten.add(product, bias), aten.add(x, 1.0)),)


def _of_one_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return (aten.add(aten.addmm(bias[:1], x, weight), aten.add(x, 1.0)),)


@pytest.mark.parametrize(
    "function",
    [
        _onto_an_input,
        _used_twice,
        _read_here,
        _without_bias,
        _of_another_type,
        _broadcast,
        _of_one_row,
        _rows_side_by_side,
        _of_one_bias,
        _of_one_column,
        _widened,
    ],
)
def test_every_other_sum_stays_as_it_is(function: Any) -> None:
    tensors = torch.randn(5, 4), torch.randn(4, 4), torch.randn(4)
    graph_module = _traced(function, *tensors)
    assert _in_place(graph_module) == 0
    torch.testing.assert_close(graph_module(*tensors), function(*tensors))


@pytest.fixture(scope="module")
def block(host: Host) -> RegionSpec:
    """A transformer block of a narrow SDXL."""
    plan = plan_model(host.load("narrowxl")[0].model.diffusion_model)
    assert not isinstance(plan, str)
    place = next(place for place in plan.places if place.form.name == "block")
    return describe_place(place, plan, dtype=torch.float16, device="cpu")


def _program(description: RegionSpec) -> Program:
    return export(code_of(description))


def test_the_hosts_block_adds_its_last_product_in_place(block: RegionSpec) -> None:
    sizes = {"batch": 2, "tokens": 9, "context": 7}
    program = _program(block)
    module, _ = _compiled(program.graph_module)
    weights, inputs = program.example(sizes)
    [expected] = program.run(weights, inputs)
    [found] = module.call([*weights, *inputs])
    assert relative_l2(found, expected) <= 2e-3


# --- rounded once ---------------------------------------------------------------------------------


class _Projections(torch.nn.Module):
    """Queries, keys and values of one input by layers of the host's that round it, two of them by
    scales of their own; and an output.
    """

    def __init__(self) -> None:
        super().__init__()
        layers = [HostLayer(name, 64, 64, "float8_e4m3fn") for name in "qkvabo"]
        for layer in layers[3:5]:
            layer.input_scale = torch.nn.Parameter(torch.tensor(0.01), requires_grad=False)
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        normed = torch.nn.functional.layer_norm(x, x.shape[-1:])
        *each, out = self.layers
        return (out(sum(layer(normed) for layer in each)),)


def test_what_several_products_take_is_rounded_and_written_once() -> None:
    x, rows = torch.randn(2, 16, 64), torch.export.Dim("rows", min=2, max=64)
    module = _Projections()
    with torch.no_grad(), tracing.size_oblivious():
        exported = torch.export.export(module, (x,), dynamic_shapes={"x": {1: rows}})
    turns.give(exported.graph_module.graph)
    compiled, source = compiling.compile_wrapper(
        exported.graph_module, compiling.CONFIG, last_pass=rounding.round_once
    )
    calls = re.findall(r"host_layer_of_rounded.default\((\w+), (\w+), '(\w)'", source)
    assert len(calls) == 6
    rounded = {name: values for values, _, name in calls}
    assert rounded["q"] == rounded["k"] == rounded["v"] and len(set(rounded.values())) == 4
    with torch.no_grad():
        (expected,) = module(x)
        scales = [layer.input_scale for layer in module.layers if layer.input_scale is not None]
        (result,) = compiled.call([*scales, x])
    assert relative_l2(result, expected) < 1e-3
