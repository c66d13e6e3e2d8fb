"""A learned model whose own code keeps something from one step to the next: over several runs its
images are ComfyUI's, and its blocks are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from . import learned_models
from .learned import CALLS, arguments, error
from .learned_steps import Steps
from .rows import some_rows

#: What a root keeps, by the model's name: set up, and what it does at each step. `k` is the number
#: of its steps.
KEPT = {
    "NestedDict": ("self.s = {'a': {'k': 0}}", "self.s['a']['k'] += 1; k = self.s['a']['k']"),
    "Namespace": ("self.s = SimpleNamespace(k=0)", "self.s.k += 1; k = self.s.k"),
    "GlobalList": ("SEEN.clear()", "SEEN.append(1); k = len(SEEN)"),
    "ClassAttribute": ("type(self).count = 0", "type(self).count += 1; k = type(self).count"),
    "MutableDefault": ("self.note.__func__.__defaults__[0].clear()", "k = self.note()"),
    "AnIterator": ("self.steps = iter(range(1, 99))", "k = next(self.steps)"),
    "InPlaceTensor": ("self.t = torch.zeros(1)", "self.t += 1; k = self.t"),
    "InPlaceBuffer": ("self.register_buffer('t', torch.zeros(1))", "self.t += 1; k = self.t"),
    "PythonRandom": ("random.seed(5)", "k = random.random()"),
    "OwnGenerator": (
        "self.g = torch.Generator().manual_seed(5)",
        "k = torch.rand(1, generator=self.g)",
    ),
    "NumpyRandom": ("self.r = numpy.random.default_rng(5)", "k = float(self.r.random())"),
    "TorchRandom": ("torch.manual_seed(5)", "k = torch.rand(1)"),
    "CacheInAnObject": (
        "self.c = Cache()",
        "self.c.last = self.c.last * 0.5 + x.mean(); k = self.c.last",
    ),
    "NoneAtAll": ("pass", "k = 1"),
}
QUICK = ("NestedDict", "GlobalList", "InPlaceTensor", "PythonRandom", "TorchRandom", "NoneAtAll")
SOURCE = """
import random
from types import SimpleNamespace
import numpy

SEEN = []


class Cache:
    def __init__(self):
        self.last = torch.zeros(())


class Kept(Model):
    def note(self, seen=[]):
        seen.append(1)
        return len(seen)

    def weigh(self, x):
        raise NotImplementedError

    def forward(self, x, timestep, context, transformer_options={}):
        k = self.weigh(x)
        return super().forward(x, timestep, context, transformer_options) * (1 + 0.1 * k)
"""
for _name, (_set, _move) in KEPT.items():
    SOURCE += f"""

class {_name}(Kept):
    def __init__(self):
        super().__init__()
        {_set}

    def weigh(self, x):
        {_move}
        return k
"""

#: What a root may see of a block's result but its values: what the block gives, and what the root
#: makes of it.
SEEN_OF = {
    "IsTheSame": ("x if x.shape[1] == 29 else x + m", "y if y is x else 2 * y"),
    "IsContiguous": ("(x + m).transpose(1, 2).contiguous().transpose(1, 2)", "y + y.stride(1)"),
    "OfAnother": ("torch.cat((x, x + m), 1)[:, x.shape[1]:]", "y + y.storage_offset()"),
    "AParameter": (
        "torch.nn.Parameter(x + m, requires_grad=False)",
        "2 * y if isinstance(y, torch.nn.Parameter) else y",
    ),
}
for _name, (_gives, _made) in SEEN_OF.items():
    SOURCE += f"""

class {_name}Block(Block):
    def forward(self, x, vec, transformer_options={{}}):
        m = self.mix(x, vec, transformer_options)
        return {_gives}


class {_name}(Model):
    block = {_name}Block

    def run(self, h, vec, options):
        for block in self.blocks:
            x = h
            y = block(x, vec, transformer_options=options)
            h = {_made}
        return h
"""


@pytest.fixture(scope="module")
def models(host: Host) -> Iterator[Any]:
    yield learned_models.load(learned_models.SOURCE + SOURCE)
    learned_models.unload()


SIZES = (CALLS[0], CALLS[0], CALLS[0], CALLS[1], CALLS[1], CALLS[2], CALLS[2], CALLS[0])


def alone(models: Any, name: str) -> list[torch.Tensor]:
    """What ComfyUI makes of the same steps, without us."""
    torch.manual_seed(3)
    root = getattr(models, name)().eval().requires_grad_(False)
    return [root(*arguments(*sizes), transformer_options={}) for sizes in SIZES]


@pytest.mark.parametrize("name", some_rows(KEPT, QUICK))
def test_what_a_model_keeps_moves_on_once_a_step(
    learned_steps: Callable[[str], Steps], models: Any, name: str
) -> None:
    """Its results are ComfyUI's over several runs, and its blocks compiled."""
    wanted = alone(models, name)
    for _ in range(2):  # learned and built in this process, which moves on what it keeps itself
        learned_steps(name).make()
    made = learned_steps(name)  # which sets that up anew
    for sizes, reference in zip(SIZES, wanted, strict=True):
        before = made.scope.compiled_calls
        assert error(made.make(sizes), reference) < 1e-5
    assert made.scope.compiled_calls - before == 2 and made.reasons() == set()


def test_a_step_that_is_compared_counts_one(learned_steps: Callable[[str], Steps]) -> None:
    for name in ("Namespace", "InPlaceTensor"):
        made = learned_steps(name)
        for count in (1, 2, 3):
            made.make()
            kept = made.root.s.k if name == "Namespace" else float(made.root.t)
            assert kept == count


@pytest.mark.parametrize("name", SEEN_OF)
def test_what_a_result_is_counts_as_much_as_what_is_in_it(
    learned_steps: Callable[[str], Steps], name: str
) -> None:
    made = learned_steps(name)
    for sizes in (*SIZES, *CALLS, *CALLS):
        assert made.run(sizes)[1] < 1e-5
    if name == "IsContiguous":  # a graph's results are laid as those were
        assert made.scope.compiled_calls > 0 and made.reasons() == set()


def test_too_little_memory_for_a_comparison_leaves_calls_to_the_host(
    learned_steps: Callable[[str], Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times; then the place rests."""
    from warmgraph_backends.runtime import beside, verifier

    made = learned_steps("NoneAtAll")
    made.run()

    def full(live: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patched:
        patched.setattr(beside.Inputs, "of", full)
        assert made.run() == (0, 0.0)
    assert made.run() == (0, 0.0) and made.run()[0] == 2  # compared, and served
    again = learned_steps("NoneAtAll")
    with monkeypatch.context() as patched:
        patched.setattr(beside.Inputs, "of", full)
        for _ in range(verifier.MOST_UNSURE):
            before = again.scope.account.compared
            assert again.run() == (0, 0.0)
            count = again.scope.account.compared - before
            assert count == 2  # so that none is a clean call for a capture
    assert again.run() == (0, 0.0) and again.reasons() == {"learned_unsure"}


def test_a_graph_that_differs_at_one_place_is_never_given_on(
    learned_steps: Callable[[str], Steps],
) -> None:
    """In the run whose comparison shows it, and afterwards."""
    made = learned_steps("NoneAtAll")
    made.run()
    assert made.run() == (0, 0.0) and made.run()[0] == 2
    [graph] = made.scope.graphs
    status = graph.status
    loaded = status.loaded
    good = loaded.call
    wrong = loaded._replace(call=lambda values: tuple(1.01 * each for each in good(values)))
    graph.status = graph.status._replace(loaded=wrong)
    for _ in range(3):
        assert made.run(CALLS[0], another="structure") == (0, 0.0)
    graph.status = status  # the other tests'


def test_another_nodes_attention_is_called_as_often_as_by_the_host(
    learned_steps: Callable[[str], Steps],
) -> None:
    """No call is compared in which it takes part; others speak for it."""
    called: list[int] = []

    def attend(function: Any, *args: Any, **named: Any) -> Any:
        called.append(1)
        return function(*args, **named)

    def run() -> int:
        before = made.scope.compiled_calls
        made.make(CALLS[0], optimized_attention_override=attend)
        return made.scope.compiled_calls - before

    made = learned_steps("NoneAtAll")
    made.make()
    assert run() == 0 and made.reasons() == {"learned_unproven"} and len(called) == 2
    assert made.served()[0] == 2
    assert run() == 2 and len(called) == 4
