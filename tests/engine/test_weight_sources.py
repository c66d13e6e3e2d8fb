"""A way in which weights come is one class: a model's list of them is all that knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from warmgraph_backends.contract import WeightSpec
from warmgraph_backends.weights.fetching import ModelWeights, RegionWeights
from warmgraph_backends.weights.source import Brought, WeightSource
from warmgraph_tools.inprocess import Host

DEVICE, DTYPE = torch.device("cpu"), torch.float32


class Borrowed(WeightSource):
    """A made-up one: brings copies of layers that say so, and may not keep them when it is full."""

    name = "borrowed"
    holds = True

    def __init__(self) -> None:
        self.signature: bytes | None = b"1"
        self.may_be_kept = True
        self.fetched = self.held = 0

    def takes(self, module: Any) -> bool:
        return getattr(module, "is_borrowed", False)

    def fetch(self, modules: Sequence[Any]) -> Brought:
        self.fetched += 1
        pairs = {id(m): (m.weight.clone(), m.bias.clone()) for m in modules}
        return Brought(pairs, self.name, self.may_be_kept)

    def hold(self) -> bytes | None:
        self.held += self.signature is not None
        return self.signature

    def release(self) -> None:
        self.held -= 1


class Block:
    """Two layers of the host's, the first of which may come the made-up way."""

    def __init__(self) -> None:
        import comfy.ops

        self.module = torch.nn.Sequential(
            *(comfy.ops.manual_cast.Linear(8, 8, dtype=DTYPE, device="cpu") for _ in range(2))
        )
        for layer in self.layers:
            torch.nn.init.normal_(layer.weight)
            torch.nn.init.normal_(layer.bias)
        self.layers[0].is_borrowed = True
        self.borrowed = Borrowed()
        self.model = ModelWeights(self.module, DEVICE, DTYPE)
        self.model.sources = (*self.model.sources, self.borrowed)
        shapes = {"weight": (8, 8), "bias": (8,)}
        specs = [WeightSpec(f"{n}.{a}", s, "float32") for n in "01" for a, s in shapes.items()]
        self.region = RegionWeights(self.module, specs, self.model)
        self.model.begin_run()
        self.model.begin_step()

    @property
    def layers(self) -> list[Any]:
        return list(self.module)

    def call(self) -> tuple[list[torch.Tensor], str]:
        """The weights of a call, and what they are called."""
        given = self.region.fetch()
        parameters = [p for layer in self.layers for p in (layer.weight, layer.bias)]
        assert all(map(torch.equal, given.tensors, parameters))
        assert given.tensors[2] is self.layers[1].weight, "what lies ready is given as it is"
        assert self.borrowed.held == (given.release is not None)
        if given.release is not None:
            given.release()
        assert self.borrowed.held == 0
        return given.tensors, given.weight_class


@pytest.fixture
def block(host: Host) -> Block:
    return Block()


def test_what_it_gives_is_kept_and_held_while_its_signature_stands(block: Block) -> None:
    first, name = block.call()
    assert name == "borrowed", "by what lies furthest away"
    again, _ = block.call()
    assert again[0] is first[0] is not block.layers[0].weight and block.borrowed.fetched == 1
    block.borrowed.signature = b"2"
    assert block.call()[0][0] is not first[0] and block.borrowed.fetched == 2
    block.model.begin_run()
    block.call()
    assert block.borrowed.fetched == 3


def test_what_may_not_be_kept_comes_at_each_call(block: Block) -> None:
    block.borrowed.may_be_kept = False
    block.call(), block.call()
    assert block.borrowed.fetched == 2
    block.borrowed.may_be_kept, block.borrowed.signature = True, None  # nothing can be held
    block.call(), block.call()
    assert block.borrowed.fetched == 4


def test_a_replaced_parameter_ends_what_lies_ready_and_not_what_was_brought(block: Block) -> None:
    block.call()
    for layer, fetched in ((block.layers[0], 1), (block.layers[1], 2)):
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        block.model.begin_step()
        block.call()
        assert block.borrowed.fetched == fetched


def test_without_it_the_model_is_what_it_was(block: Block) -> None:
    block.layers[0].is_borrowed = False
    for _ in range(2):
        tensors, name = block.call()
        assert name == "resident" and tensors[0] is block.layers[0].weight
    assert block.borrowed.fetched == 0
