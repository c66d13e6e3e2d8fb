"""A kind becomes an exported program: the host's code traced once with symbolic sizes.

Weights are lifted to inputs, batch, height, width and token counts are symbols with declared
ranges, and nothing needs real weights: twins are made of fake tensors on the run device.
https://docs.pytorch.org/docs/stable/export.html
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.export import Dim
from torch.export.graph_signature import InputKind

from ..compilers.rewrites import tracing
from ..contract import InputSpec, Program, RegionSpec, Symbol, WeightSpec
from ..errors import BuildError
from ..kinds.layout import CONTIGUOUS, lay_out, memory_format
from ..operators import host_attention, host_layer
from ..operators.attention_layer import AttentionLayer
from ..operators.stand_in import refuse_questions
from ..plans.region_code import RegionCode
from ..reasons import of
from ..torch_api import turns
from ..torch_api.tracing import (
    conditions_tried,
    cudnn,
    fake_mode,
    fakes_worked_out,
    size_oblivious,
    uses_cudnn,
)
from .joined import join_layers

#: About as large are whole numbers that stand for others.
_WHOLE = 8


class _Region(torch.nn.Module):
    """What is traced: the form's reference over a module, its results in the kind's layout.

    Made before the tracing, because then convolutions are as at run time.
    """

    def __init__(self, module: torch.nn.Module, form: Any, layout: str) -> None:
        super().__init__()
        self.module = module
        self.form = form
        self.layout = layout
        self.cudnn = uses_cudnn()

    def _attending(self) -> AbstractContextManager[None]:
        if not self.form.live_attention:
            return nullcontext()
        layers = any(isinstance(part, AttentionLayer) for part in self.module.modules())
        return host_attention.traced(layers=layers)

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        with cudnn(self.cudnn):
            with tracing(self.layout), self._attending(), host_layer.activations_folded():
                results = self.form.computed(self.module, inputs)
            return tuple(
                result.contiguous(memory_format=memory_format(result, self.layout))
                for result in results
            )


def export(code: RegionCode) -> Program:
    """Export a kind.

    Raises:
        BuildError: the export narrowed a declared range or specialised a symbol, or the host's code
            asks for something, or passes it to attention, that no graph knows.
        DescriptionError: the module tree cannot be rebuilt here.
    """
    description = code.spec
    device = torch.device(description.device)
    sizes = {s.name: s.example for s in description.symbols}
    with torch.no_grad(), size_oblivious(), fakes_worked_out():
        with fake_mode():
            twin = code.twin(lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
            region = _Region(twin, code.form, description.layout).eval()
            examples = tuple(
                example_input(spec, sizes, device, description.layout)
                for spec in description.inputs
            )
        exported = _export(description, region, examples)
    refuse_questions(twin.modules())
    _check_ranges(description, exported)
    join_layers(exported.graph_module)
    turns.give(exported.graph_module.graph)
    weights = _weights(exported)
    return Program(
        description,
        exported.graph_module,
        weights,
        run=code.run,
        run_in_full=partial(code.run, in_full=True),
        example=_Example(description, weights),
        work=_work(description, exported.graph_module),
        attends=any(_attends(node) for node in exported.graph.nodes),
    )


class _Example(NamedTuple):
    """Makes random weights and inputs of a kind."""

    description: RegionSpec
    weights: Sequence[WeightSpec]

    def __call__(
        self, sizes: Mapping[str, int] | None = None
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Make them on the run device, by default at the example sizes."""
        description = self.description
        device = torch.device(description.device)
        generator = torch.Generator(device).manual_seed(0)
        chosen = {s.name: s.example for s in description.symbols} | dict(sizes or {})
        weights = []
        for spec in self.weights:
            fan_in = max(1, math.prod(spec.shape[1:]))
            values = torch.randn(spec.shape, device=device, generator=generator)
            weights.append((values / math.sqrt(fan_in)).to(getattr(torch, spec.dtype)))
        inputs = [
            example_input(spec, chosen, device, description.layout, generator)
            for spec in description.inputs
        ]
        return weights, inputs


def example_input(
    spec: InputSpec,
    sizes: dict[str, int],
    device: torch.device,
    layout: str = CONTIGUOUS,
    generator: torch.Generator | None = None,
) -> Any:
    """Make one input at the given sizes: an integer, or a tensor, random with a generator. Whole
    numbers are zeros, which is always a valid index; in int8 they are not an index, and so small
    that float16 holds sums of their products.
    """
    if spec.dtype == "int":
        return sizes[str(spec.dims[0])]
    shape = [sizes[d] if isinstance(d, str) else d for d in spec.dims]
    dtype = getattr(torch, spec.dtype)
    is_random = dtype.is_floating_point or dtype in (torch.bool, torch.int8)
    if not is_random:
        return lay_out(torch.zeros(shape, dtype=dtype, device=device), layout)
    if generator is None:
        return lay_out(torch.empty(shape, dtype=dtype, device=device), layout)
    drawn = torch.randn(shape, device=device, generator=generator)
    if dtype is torch.int8:
        drawn = (_WHOLE * drawn).round_()
    return lay_out(drawn.to(dtype), layout)


def _export(description: RegionSpec, region: torch.nn.Module, examples: tuple[Any, ...]) -> Any:
    """Export over the ranges of `_traced_range`, the weights as inputs."""
    shapes = (_dynamic_shapes(description),)
    try:
        with conditions_tried():
            return torch.export.export(region, examples, dynamic_shapes=shapes, strict=False)
    except BuildError:
        raise
    except Exception as error:
        raise BuildError(
            of("export_failed", label=description.label, error=_first_line(error))
        ) from error


def _traced_range(symbol: Symbol) -> tuple[int, int]:
    """The declared range from 2 on: torch checks whether a dimension is 1 to see if a layout is
    contiguous, and would refuse most regions. The build's check runs the graph at 1.
    """
    return max(2, symbol.minimum), symbol.maximum


def _dynamic_shapes(description: RegionSpec) -> tuple[Any, ...]:
    ranges = {s.name: _traced_range(s) for s in description.symbols}
    dims = {name: Dim(name, min=low, max=high) for name, (low, high) in ranges.items()}
    shapes: list[Any] = []
    for spec in description.inputs:
        if spec.dtype != "int":
            shapes.append({i: dims[d] for i, d in enumerate(spec.dims) if d in dims})
        elif (name := str(spec.dims[0])) in ranges:
            low, high = ranges[name]
            shapes.append(Dim.DYNAMIC(min=low, max=high))
        else:
            shapes.append(None)
    return tuple(shapes)


def _check_ranges(description: RegionSpec, exported: Any) -> None:
    """Every declared symbol must have survived with its range."""
    declared = {_traced_range(s) for s in description.symbols}
    symbols = [node for node in exported.graph.nodes if node.op == "placeholder"][
        -len(description.inputs) :
    ]
    for spec, node in zip(description.inputs, symbols, strict=True):
        sizes = [node.meta["val"]] if spec.dtype == "int" else list(node.meta["val"].shape)
        for declared_dim, size in zip(spec.dims, sizes, strict=True):
            if isinstance(declared_dim, str) and not isinstance(size, torch.SymInt):
                fixed = {"dim": declared_dim, "name": spec.name, "size": size}
                raise BuildError(of("export_fixed", label=description.label, **fixed))
    for symbol, found in exported.range_constraints.items():
        bounds = (int(found.lower), int(found.upper))
        if not any(bounds[0] <= low and high <= bounds[1] for low, high in declared):
            narrowed = {"symbol": symbol, "bounds": bounds}
            raise BuildError(of("export_narrowed", label=description.label, **narrowed))


def _weights(exported: Any) -> list[WeightSpec]:
    weights = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            continue
        if spec.kind != InputKind.PARAMETER or not spec.target.startswith("module."):
            raise BuildError(of("export_inputs", sort=spec.kind, name=spec.target))
        weights.append(spec.target)
    values = {n.name: n.meta["val"] for n in exported.graph.nodes if n.op == "placeholder"}
    names = [s.arg.name for s in exported.graph_signature.input_specs]
    return [
        WeightSpec(
            target.removeprefix("module."),
            tuple(values[name].shape),
            str(values[name].dtype).removeprefix("torch."),
        )
        for target, name in zip(weights, names, strict=False)
    ]


def _work(description: RegionSpec, graph_module: torch.fx.GraphModule) -> float:
    """The largest tensor of the graph relative to the first input, both at the example sizes."""
    elements = []
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            elements.append(_hint(value.numel()))
    sizes = {s.name: s.example for s in description.symbols}
    first = 1
    for dim in description.inputs[0].dims:
        first *= sizes[dim] if isinstance(dim, str) else dim
    return max(elements) / first


def _attends(node: torch.fx.Node) -> bool:
    return node.target is host_attention.OPERATOR or "scaled_dot_product" in str(node.target)


def _hint(value: Any) -> int:
    return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:400] or type(error).__name__
