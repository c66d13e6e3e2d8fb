"""A stand-in for a GPU that multiplies by int8 weights: the times that its kernels take are given,
and the very source of ours runs on the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.choices import autotuner, int8_products
from warmgraph_backends.choices.int8_products import Int8Products
from warmgraph_backends.choices.own_products import form_of
from warmgraph_backends.host_api import kitchen
from warmgraph_backends.kernels import int8_rows, int8_sums
from warmgraph_tools import cuda_on_cpu
from warmgraph_tools import small_transformers as transformers

MACHINE = "card/torch"
PATH = "double_blocks.0.img_mlp.2"
#: In milliseconds, by way.
TIMES = {"host": 1.0, "apart": 0.5, "ours": 0.25}
#: Of 1024 features each.
SEVERAL = ("double_blocks.0.img_mlp.2", "double_blocks.1.img_mlp.2", "double_blocks.0.txt_mlp.2")


class Card:
    """A GPU that takes these milliseconds; counts what was timed and what our kernel quantised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.times = dict(times)
        self.timed = 0
        self.ways: set[str] = set()  # that were timed last
        self.apart = 0
        self.is_capturing = False

        def by_turns(runs: Any, *, are_short: bool) -> dict[str, float]:
            assert are_short
            self.timed += 1
            self.ways = set(runs)
            return {name: self.times[name] for name in runs}

        def multiply(*given: Any) -> torch.Tensor:
            self.apart += 1
            return product_of_rows(*given)

        def compile_kernel(source: str, name: str, *_: Any) -> Any:
            return cuda_on_cpu.compile_cuda(source, name)

        monkeypatch.setattr(int8_products, "_is_open", lambda input: True)
        monkeypatch.setattr(int8_products, "current_stream", lambda device: 0)
        monkeypatch.setattr(int8_rows, "compile_or_warn", compile_kernel)
        monkeypatch.setattr(int8_rows, "is_capturing", lambda device: self.is_capturing)
        monkeypatch.setattr(autotuner, "by_turns", by_turns)
        monkeypatch.setattr(kitchen, "multiply_int8_rows", multiply)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing, raising=False
        )


def product_of_rows(
    rows: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    stream: int,
) -> torch.Tensor:
    """What the library's kernel for GPUs gives (`kitchen.multiply_int8_rows`)."""
    found = torch._int_mm(rows, values.T).double() * scales.double() * scale.double().view(1, -1)
    return (found if bias is None else found + bias.double()).to(dtype)


def layer_of(form: str) -> Any:
    """A layer of the host's with int8 weights: 1024 to 256 features."""
    return transformers.load_quantised("flux1", form).model.diffusion_model.get_submodule(PATH)


def several(form: str | Callable[[str], str]) -> list[tuple[Any, Any]]:
    """Weights with biases of three layers; the last one has none."""
    root = transformers.load_quantised("flux1", form).model.diffusion_model
    found = [root.get_submodule(path) for path in SEVERAL]
    return [*((layer.weight, layer.bias) for layer in found[:2]), (found[2].weight, None)]


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, 1024, generator=torch.Generator().manual_seed(3)).to(dtype)


class Graph:
    """A graph that multiplies, with plain maths and a factor in its place; counts its calls."""

    def __init__(self, factor: float = 1.0) -> None:
        self.key = "0123456789abcdef"
        self.factor = factor
        self.calls = 0
        self.is_there = True
        self.dropped: Any = None

    @property
    def loaded(self) -> Any:
        return self if self.is_there and self.dropped is None else None

    def drop(self, reason: Any) -> None:
        self.dropped = reason

    def call(self, given: list[Any]) -> tuple[torch.Tensor]:
        self.calls += 1
        result = int8_sums.multiply(*given)
        given.clear()
        return (self.factor * result,)


def offered(graph: Graph, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Int8Products:
    products = Int8Products(directory, MACHINE)
    products.own.graphs.offer(form_of(dtype), "cpu", graph)
    return products


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def noting_rows(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Return the list that gets the shapes of what our kernel quantises from now on."""
    seen: list[torch.Size] = []
    quantise = int8_rows.Int8Rows.quantise

    def noted(kernel: Any, rows: torch.Tensor, **options: Any) -> Any:
        seen.append(rows.shape)
        return quantise(kernel, rows, **options)

    monkeypatch.setattr(int8_rows.Int8Rows, "quantise", noted)
    return seen


def refusing(*_: Any) -> Any:
    raise RuntimeError("not the known one")
