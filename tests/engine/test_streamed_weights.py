"""Weights that lie elsewhere: a region's are brought over together, as the host would each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.host_api import memory
from warmgraph_backends.weights.casting import fetch_loose
from warmgraph_backends.weights.small import MOST, SmallTensors
from warmgraph_backends.weights.streamed import Streamed
from warmgraph_tools.inprocess import Host

#: Of a layer here none is on it.
ELSEWHERE = torch.device("cpu", 1)


@pytest.fixture
def layer(host: Host) -> Any:
    import comfy.ops

    layer = comfy.ops.manual_cast.Linear(8, 4, dtype=torch.float32, device="cpu")
    layer.weight.data = torch.arange(32.0).view(4, 8)
    layer.bias.data = torch.arange(4.0)
    return layer


def theirs(layer: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """What the host computes with."""
    import comfy.ops

    weight, bias = comfy.ops.cast_bias_weight(layer, None, dtype, ELSEWHERE, dtype)
    return weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
def test_each_is_what_the_host_computes_with(layer: Any, dtype: torch.dtype, patched: bool) -> None:
    import comfy.ops

    other = comfy.ops.manual_cast.Linear(4, 4, bias=False, dtype=torch.float16, device="cpu")
    other.weight.data.fill_(0.5)
    if patched:
        layer.weight_function = [lambda weight: weight.mul_(2), lambda weight: weight + 1]
        layer.bias_function = [lambda bias: bias - 3]
    before = [layer.weight.clone(), layer.bias.clone()]
    brought = Streamed(ELSEWHERE, dtype, None).fetch([layer, other])
    found = brought.pairs
    assert brought.release is None and not brought.may_be_kept
    for module in (layer, other):
        for mine, his in zip(found[id(module)], theirs(module, dtype), strict=True):
            assert (mine is his is None) or (mine.dtype is dtype and torch.equal(mine, his))
    unchanged = zip(before, (layer.weight, layer.bias), strict=True)
    assert all(torch.equal(a, b) for a, b in unchanged), "patches may write into what they get"


def test_a_layer_of_which_the_bias_alone_is_elsewhere_is_brought_over(layer: Any) -> None:
    meta = torch.device("meta")
    layer.weight = torch.nn.Parameter(layer.weight.to(meta), requires_grad=False)
    streamed = Streamed(meta, torch.float32, None)
    assert streamed.takes(layer)
    weight, bias = streamed.fetch([layer]).pairs[id(layer)]
    assert weight is layer.weight and bias.device == meta and bias.shape == (4,)


def test_a_parameter_that_lies_askew_in_its_file_is_copied() -> None:
    file = torch.arange(9.0)
    askew = torch.nn.Parameter(file[1:5], requires_grad=False)
    here, dtype = torch.device("cpu"), torch.float32
    assert file.data_ptr() % 16 == 0 != askew.data_ptr() % 16
    kind, found = fetch_loose(askew, here, dtype)
    assert kind == "cast" and torch.equal(found, askew) and found.data_ptr() % 16 == 0
    even = torch.nn.Parameter(file[4:8], requires_grad=False)
    assert fetch_loose(even, here, dtype) == ("resident", even)


def test_a_small_tensor_is_brought_once_and_then_again_when_it_was_forgotten() -> None:
    meta = torch.device("meta")
    small = SmallTensors(meta)
    tensor, other, large = torch.ones(8), torch.ones(8), torch.ones(MOST // 4 + 1)
    first = small.bring(tensor)
    assert first is not None and first.device == meta and small.bring(tensor) is first
    assert small.bring(other) is not first and small.bring(large) is None
    small.forget()
    assert small.bring(tensor) is not first


def test_a_loose_parameter_elsewhere_is_brought_at_each_call() -> None:
    """The host writes a LoRA of one conditioning into it, and takes it back, within a step."""
    parameter = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    for value in (1.0, 2.0):
        parameter.data.fill_(value)
        kind, found = fetch_loose(parameter, ELSEWHERE, torch.float32)
        assert kind == "streamed" and (found == value).all()
    eight = torch.nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
    assert fetch_loose(eight, torch.device("meta"), torch.float16)[1].dtype is torch.float16


def test_nothing_comes_ahead_where_the_host_brings_nothing_over_beside_the_work(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management as management

    assert memory.room_for_weights(torch.device("cpu")) is None
    monkeypatch.setattr(management, "NUM_STREAMS", 0)
    assert memory.room_for_weights(torch.device("cuda")) is None
    monkeypatch.setattr(management, "NUM_STREAMS", 2)
    assert memory.room_for_weights(torch.device("cuda")) is not None
