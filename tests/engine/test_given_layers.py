"""The host's quantised layers within a region are multiplied by weights that came with the region's
own, where a call of one is no more than that product; else it is called.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from warmgraph_backends.host_api import casting
from warmgraph_backends.host_api.given import multiplies_as_given
from warmgraph_backends.weights.fetching import ModelWeights, RegionWeights
from warmgraph_backends.weights.lanes import Lanes
from warmgraph_backends.weights.streamed import Streamed
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import Lab, call_instead, relative
from .quantised_runs import LAYER, QUANTISED, Flux, flux, rounding

ELSEWHERE = torch.device("cpu", 1)


@pytest.fixture
def calls(host: Host, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each of the host's layers took its weights for a call, by its id."""
    import comfy.ops

    cast, counts = comfy.ops.cast_bias_weight, Counter[int]()

    def counted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        counts[id(layer)] += 1
        return cast(layer, *args, **kwargs)

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", counted)
    return counts


def within_blocks(model: Any) -> list[Any]:
    """The quantised layers of a small transformer that lie within its regions."""
    root = model.model.diffusion_model
    return [
        layer
        for name, layer in root.named_modules()
        if getattr(layer, "quant_format", None) and "blocks." in name
    ]


def settled(run: Flux) -> Flux:
    """The first call of each graph is compared with the host's layers."""
    run.sample(run.ours)
    return run


@pytest.mark.slow
def test_layers_are_not_called(host: Host, shared: Lab, calls: Counter[int]) -> None:
    run = settled(Flux(host, shared, flux("int8_convrot")))
    calls.clear()
    ours = run.sample(run.ours)
    assert run.is_compiled() and not any(calls[id(layer)] for layer in within_blocks(run.plain))
    assert relative(ours, run.sample(run.plain)) < QUANTISED
    assert all(calls[id(layer)] for layer in within_blocks(run.plain)), "as the host does it"


@pytest.mark.usefixtures("multiplies_fp8")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wan", "flux1"])
def test_layers_whose_inputs_a_graph_rounds_are_not_called(
    host: Host, shared: Lab, calls: Counter[int], kind: str
) -> None:
    run = settled(Flux(host, shared, rounding(kind), kind))
    assert sum(run.rounded()) > 0
    calls.clear()
    ours = run.sample(run.ours)
    assert run.is_compiled() and not any(calls[id(layer)] for layer in within_blocks(run.plain))
    assert relative(ours, run.sample(run.plain)) < QUANTISED


@contextlib.contextmanager
def hooked(layer: Any) -> Iterator[None]:
    handle = layer.register_forward_hook(lambda layer, inputs, output: 2 * output)
    yield
    handle.remove()


@contextlib.contextmanager
def with_own_forward(layer: Any) -> Iterator[None]:
    forward = layer.forward
    layer.forward = lambda input: 2 * forward(input)
    yield
    del layer.forward


@contextlib.contextmanager
def of_another_host(layer: Any) -> Iterator[None]:
    """Another version's class multiplies by something more."""
    cls = type(layer)
    forward = cls.forward

    class Newer(cls):  # type: ignore[misc, valid-type]
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.output_scale * forward(self, input)
            return result

    Newer.__module__ = cls.__module__
    layer.__class__, layer.output_scale = Newer, 2.0
    yield
    layer.__class__ = cls
    del layer.output_scale


@contextlib.contextmanager
def with_smoothing(layer: Any) -> Iterator[None]:
    """As ModelOpt's files have it."""
    layer.pre_quant_scale = torch.full((), 2.0)
    yield
    del layer.pre_quant_scale


@contextlib.contextmanager
def in_full(layer: Any) -> Iterator[None]:
    layer._full_precision_mm = True
    yield
    layer._full_precision_mm = False


@pytest.mark.parametrize(
    "changed", [hooked, with_own_forward, of_another_host, with_smoothing, in_full]
)
def test_a_layer_that_does_more_than_the_product_is_called(
    host: Host, shared: Lab, calls: Counter[int], changed: Callable[[Any], Any]
) -> None:
    run = settled(Flux(host, shared, flux("int8_convrot")))
    layer = run.plain.model.diffusion_model.get_submodule(LAYER)
    before = run.sample(run.ours)
    with changed(layer):
        run.sample(run.ours)
        calls.clear()
        ours, theirs = run.sample(run.ours), run.sample(run.plain)
    assert calls[id(layer)] == 2 * 2, "once a step, by ours and by the host"
    assert relative(ours, theirs) < 2 * QUANTISED
    if changed is not in_full:
        assert relative(ours, before) > 2 * QUANTISED
    assert torch.equal(run.sample(run.ours), before)


def test_a_newer_hosts_call_is_known_and_a_patched_one_is_not(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.load_quantised("flux1", "int8_convrot").model
    layer = model.diffusion_model.get_submodule(LAYER)

    def is_known() -> bool:
        return multiplies_as_given(layer, layer.weight.dtype, rounded=False)

    def newer(self: Any, input: Any, compute_dtype: Any = None, want_requant: Any = False) -> Any:
        options = {"offloadable": True, "compute_dtype": compute_dtype}
        with CastBiasWeightContext(self, input, **options) as (weight, bias):  # type: ignore[name-defined]  # noqa: F821
            if self._full_precision_mm and isinstance(weight, QuantizedTensor):  # type: ignore[name-defined]  # noqa: F821
                weight = weight.dequantize()
            return self._forward(input, weight, bias)

    assert is_known()
    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "forward_comfy_cast_weights", newer)
        assert is_known()
        patch.setattr(type(layer), "forward", lambda self, input: self.smoothed(input))
        assert not is_known()
    assert is_known()


# --- where they lie elsewhere ---------------------------------------------------------------------


class Block(NamedTuple):
    """A block of a small Flux 1 in int8 whose model's weights are wanted on a device."""

    module: Any
    source: ModelWeights

    def weights(self, left: Mapping[str, bool] = MappingProxyType({"img_mlp.0": False})) -> Any:
        return RegionWeights(self.module, [], self.source, left)


@pytest.fixture
def block_on(host: Host) -> Callable[..., Block]:
    def make(device: torch.device, **options: Any) -> Block:
        model = transformers.load_quantised("flux1", "int8_convrot").model
        module = model.diffusion_model.double_blocks[0]
        dtype = module.img_mlp[0].weight.dtype
        return Block(module, ModelWeights(model, device, dtype, **options))

    return make


class Turns(Lanes):
    """Notes how many bytes each turn brings."""

    def __init__(self) -> None:
        super().__init__(ELSEWHERE, None)
        self.sizes: list[int] = []

    def turn(self, size: int) -> Any:
        self.sizes.append(size)
        return super().turn(size)


def test_parts_come_with_the_regions_own_weights_in_one_turn(
    block_on: Callable[..., Block],
) -> None:
    block = block_on(ELSEWHERE)
    (streamed,) = (each for each in block.source.sources if isinstance(each, Streamed))
    streamed.lanes = turns = Turns()
    left = {"img_mlp.0": False, "img_mlp.2": False, "txt_mlp.0": True}
    given = block.weights(left).fetch().given
    assert given.keys() == {"img_mlp.0", "img_mlp.2"}, "no fp8 layer"
    size = 0
    for path, (weight, bias) in given.items():
        layer = block.module.get_submodule(path)
        assert weight.dtype is bias.dtype is layer.weight.dtype
        assert weight._qdata.data_ptr() != layer.weight._qdata.data_ptr(), "a copy"
        assert torch.equal(weight._qdata, layer.weight._qdata)
        assert torch.equal(weight._params.scale, layer.weight._params.scale)
        assert torch.equal(bias, layer.bias)
        size += weight._qdata.nbytes + bias.nbytes
    assert turns.sizes == [size], "less what is kept"


def test_scales_are_kept_for_an_epoch_and_what_is_large_comes_at_each_call(
    block_on: Callable[..., Block],
) -> None:
    meta = torch.device("meta")
    block = block_on(meta)
    weights = block.weights()

    def fetched() -> Any:
        weight, bias = weights.fetch().given["img_mlp.0"]
        assert weight._qdata.device == weight._params.scale.device == bias.device == meta
        assert type(weight) is type(block.module.img_mlp[0].weight) and weight.shape == (1024, 256)
        return weight

    one, other = fetched(), fetched()
    assert one._params.scale is other._params.scale and one._qdata is not other._qdata
    block.source.begin_run()
    assert fetched()._params.scale is not one._params.scale


def test_layers_fetch_their_own_for_an_epoch_where_there_is_no_room_for_all(
    block_on: Callable[..., Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = block_on(ELSEWHERE)
    weights = block.weights()
    bring, asked = casting.bring, []

    def full(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        asked.append(tensor)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(casting, "bring", full)
    for _ in range(3):
        assert not weights.fetch().given
    assert len(asked) == 1
    monkeypatch.setattr(casting, "bring", bring)
    block.source.begin_run()
    assert weights.fetch().given.keys() == {"img_mlp.0"}


def test_layers_fetch_their_own_where_there_is_no_room_to_compute_beside_all(
    host: Host, shared: Lab, calls: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host runs the call that found none."""
    run = settled(Flux(host, shared, flux("int8_convrot")))
    eager = run.sample(run.plain)
    fetch = RegionWeights.fetch

    def brought(weights: Any) -> Any:
        return fetch(weights)._replace(release=lambda: None)

    monkeypatch.setattr(RegionWeights, "fetch", brought)
    (graph,) = (
        kind.graph
        for kind in run.ours.get_attachment("warmgraph").scope.kinds
        if "double" in kind.graph.description.label
    )
    failed: list[Any] = []

    def full(arguments: Any) -> Any:
        if not failed:
            failed.append(arguments)
            raise torch.OutOfMemoryError("no room")
        return call(arguments)

    monkeypatch.setattr(graph, "status", graph.status)  # which others share, and get back
    call = call_instead(graph, full)
    calls.clear()
    assert relative(run.sample(run.ours), eager) < QUANTISED
    (reason,) = run.lab.engine.report(run.ours)["eager"]
    assert reason["reason"] == "out of memory in compiled code; ComfyUI's own ran this call"
    later = run.plain.model.diffusion_model.single_blocks[0].linear1
    assert failed and calls[id(later)] > 0
    calls.clear()
    run.sample(run.ours)
    assert not calls[id(later)], "in the next run there may be"


def test_where_weights_may_not_come_together_layers_fetch_their_own(
    block_on: Callable[..., Block],
) -> None:
    assert not block_on(ELSEWHERE, together=False).weights().fetch().given
