"""Region plans for made-up families, written as docs/architecture.md says, and compiled: one of
blocks that take and give a tensor, one of blocks that take two streams, write into both and give
both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.contract import InputSpec, Symbol
from warmgraph_backends.families import catalogue as registry
from warmgraph_backends.graphs.compiled_graph import State
from warmgraph_backends.plans.binding import TAKEN, Arguments, Forward
from warmgraph_backends.plans.family import Family
from warmgraph_backends.plans.plan import Form, Place, Plan, RegionCall, dispatch_one, host_results
from warmgraph_backends.runtime.pace import COMPILED, EAGER
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, call_instead, relative
from .made_up import compiled, new_lab, register


class Gate(torch.nn.Module):
    """A block of the made-up model: `[rows, C]` -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
        self.slope = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.inner(x)) * self.slope


class Tower(torch.nn.Module):
    """The made-up model: three gates and an end that no form knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = torch.nn.ModuleList([Gate(8), Gate(8), Gate(16)])
        self.widen = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gates[2](self.widen(self.gates[1](self.gates[0](x))))


class GateForm(Form):
    """Gate: `x [rows, C]` -> the same."""

    family = "tower"
    name = "gate"

    def label(self, module: Any) -> str:
        return f"Gate {module.inner.in_features}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (InputSpec("x", dtype, ("rows", module.inner.in_features)),)


GATE = GateForm()


def plan_tower(model: Any) -> Plan:
    plan = Plan(symbols={"rows": Symbol("rows", 1, 4096, 33)})
    for name, layer in model.named_modules():
        if type(layer) is Gate:
            plan.dispatches.append(dispatch_one(Place(name, layer, GATE)))
    plan.outside.append(("widen", "one product of matrices is nothing to fuse"))
    return plan


TOWER = Family(
    title="Towers",
    roots={f"{__name__}:Tower": plan_tower},
    forms={GATE.name: GATE},
    may_be_captured=lambda _: True,
    unread=frozenset({"uuids"}),
)


class Streams(torch.nn.Module):
    """A block of two streams, which it writes into: `img [batch, img, C]`, `txt [batch, txt, C]`
    and a table of both together `[txt + img, C]` -> `(img, txt)`.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.img, self.txt = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(
        self, img: torch.Tensor, txt: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joint = torch.cat((txt, img), 1) * table
        mixed = torch.softmax(joint @ joint.transpose(1, 2), -1) @ joint
        txt += self.txt(mixed[:, : txt.shape[1]])
        img += self.img(mixed[:, txt.shape[1] :])
        return img, txt


class Double(torch.nn.Module):
    """The made-up model of two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Streams(8), Streams(8)])

    def forward(self, img: torch.Tensor, txt: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        img, txt = img * 1.0, txt * 1.0  # what follows is the model's own to write into
        for block in self.blocks:
            img, txt = block(img, txt, table)
        return torch.cat((txt, img), 1)


class StreamsForm(Form):
    """Streams; the table comes in its two parts, so that each size is an input's."""

    family = "double"
    name = "streams"
    writes = (0, 1)
    arguments = Arguments(img=TAKEN, txt=TAKEN, table=TAKEN)

    def serving(self, call: RegionCall, module: Any) -> Forward:
        def serve(img: torch.Tensor, txt: torch.Tensor, table: torch.Tensor) -> Any:
            length = txt.shape[1]
            return call(img, txt, table[:length], table[length:])

        return serve

    def label(self, module: Any) -> str:
        return f"Streams {module.img.in_features}"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        width = module.img.in_features
        return (
            InputSpec("img", dtype, ("batch", "img", width)),
            InputSpec("txt", dtype, ("batch", "txt", width)),
            InputSpec("table_txt", "float32", ("txt", width)),
            InputSpec("table_img", "float32", ("img", width)),
        )

    def reference(self, module: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        img, txt, table_txt, table_img = inputs
        return host_results(module, img, txt, torch.cat((table_txt, table_img)))


STREAMS = StreamsForm()


def plan_double(model: Any) -> Plan:
    sizes = (Symbol("batch", 1, 8, 2), Symbol("img", 1, 512, 40), Symbol("txt", 1, 512, 9))
    plan = Plan(symbols={symbol.name: symbol for symbol in sizes})
    for name, layer in model.named_modules():
        if type(layer) is Streams:
            plan.dispatches.append(dispatch_one(Place(name, layer, STREAMS)))
    return plan


DOUBLE = Family(
    title="Doubles", roots={f"{__name__}:Double": plan_double}, forms={STREAMS.name: STREAMS}
)


def test_a_made_up_family_runs_compiled(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, TOWER)
    tower = Tower().requires_grad_(False)
    plan = registry.plan_model(tower)
    assert isinstance(plan, Plan) and len(plan.places) == 3
    assert registry.may_be_captured(tower)
    assert registry.unread_options(tower) == {"uuids"}

    with compiled(new_lab(tmp_path), tower, plan) as (scope, kinds), torch.inference_mode():
        assert [graph.description.label for graph in kinds] == ["Gate 8", "Gate 16"]
        for rows in (1, 2, 33, 500):
            x = torch.randn(rows, 8)
            calls = scope.compiled_calls
            made = scope.call(tower, (x,), {})
            assert relative(made.result, tower(x)) < 1e-6 and made.how == COMPILED
            assert scope.compiled_calls == calls + 3
        assert scope.eager_places() == plan.outside


def test_blocks_that_give_two_tensors_and_write_into_what_they_take_run_compiled(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, DOUBLE)
    model = Double().requires_grad_(False)
    plan = registry.plan_model(model)
    assert isinstance(plan, Plan) and len(plan.places) == 2

    with compiled(new_lab(tmp_path), model, plan) as (scope, kinds), torch.inference_mode():
        assert [graph.description.label for graph in kinds] == ["Streams 8"]
        for batch, img, txt in ((1, 1, 1), (2, 40, 9), (1, 40, 9), (1, 100, 1), (2, 7, 500)):
            inputs = torch.randn(batch, img, 8), torch.randn(batch, txt, 8)
            table = torch.randn(txt + img, 8)
            kept = [value.clone() for value in (*inputs, table)]
            calls = scope.compiled_calls
            result = scope.call(model, (*inputs, table), {}).result
            assert scope.compiled_calls == calls + 2
            assert relative(result, model(*inputs, table)) < 1e-6
            assert all(map(torch.equal, kept, (*inputs, table)))
        assert scope.eager_places() == []

        # With one wrong result a graph is not used; a call that much larger is compared.
        (graph,) = kinds
        good = call_instead(
            graph, lambda arguments: (lambda img, txt: (img, txt * 1.01))(*good(arguments))
        )
        inputs = torch.randn(8, 512, 8), torch.randn(8, 512, 8)
        table = torch.randn(1024, 8)
        for _ in range(2):  # compared once more in the next run
            scope.begin_run()
            made = scope.call(model, (*inputs, table), {})
            assert relative(made.result, model(*inputs, table)) < 1e-6 and made.how == EAGER
        assert graph.state is State.READY, "it was right before, and may be with other weights"
        reasons = [why for _, why in scope.eager_places()]
        assert len(reasons) == 2 and all("differs from ComfyUI's result" in r for r in reasons)


class Rows(torch.nn.Module):
    """Scales each row of a product by the row of a table that an index names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * table[rows]
        return result


class RowsModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Rows()

    def forward(self, x: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> Any:
        return self.block(x, table, rows)


class RowsForm(Form):
    """Rows: `x [n, 8]`, `table [m, 8]` and the index `rows [n]` -> as x."""

    family = "rows"
    name = "rows"
    arguments = Arguments(x=TAKEN, table=TAKEN, rows=TAKEN)

    def label(self, module: Any) -> str:
        return "Rows"

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        return (
            InputSpec("x", dtype, ("n", 8)),
            InputSpec("table", dtype, ("m", 8)),
            InputSpec("rows", "int64", ("n",)),
        )


def _plan_rows(model: Any) -> Plan:
    plan = Plan(symbols={s.name: s for s in (Symbol("n", 1, 512, 40), Symbol("m", 1, 16, 4))})
    plan.dispatches.append(dispatch_one(Place("block", model.block, RowsForm())))
    return plan


def test_a_block_may_take_a_tensor_of_whole_numbers(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = {f"{__name__}:RowsModel": _plan_rows}
    register(monkeypatch, Family(title="Rows", roots=roots, forms={"rows": RowsForm()}))
    model = RowsModel().requires_grad_(False)
    plan = registry.plan_model(model)
    assert isinstance(plan, Plan)
    with compiled(new_lab(tmp_path), model, plan) as (scope, _), torch.inference_mode():
        for count, size in ((30, 3), (1, 1), (200, 16)):
            inputs = torch.randn(count, 8), torch.randn(size, 8), torch.randint(0, size, (count,))
            result = scope.call(model, inputs, {}).result
            assert relative(result, model(*inputs)) < TOLERANCE
        assert scope.eager_places() == []
        assert scope.compiled_calls == 3
