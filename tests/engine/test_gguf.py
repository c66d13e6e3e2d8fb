"""GGUF files: their pack's layers are multiplied by blocks that a graph of ours unpacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warmgraph_backends.choices.choices import Products
from warmgraph_backends.cuda_graphs.piece_weights import InPlace
from warmgraph_backends.host_api import gguf
from warmgraph_backends.kernels.packed_blocks import FORMATS, Packed, unpack
from warmgraph_backends.weights.addresses import AddressBook
from warmgraph_backends.weights.fetching import Fetched, ModelWeights
from warmgraph_backends.weights.packed import InBlocks
from warmgraph_backends.weights.streamed import Streamed
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from . import gguf_pack
from .gguf_pack import CALL, MORE, TEXT
from .lab import TOLERANCE, Lab, relative, sampled
from .recorded_graphs import cuts

STEPS = 2
LAYER = "blocks.1.ffn.0"
AIDS = {"Q4_0 weights", "Q8_0 weights"}
#: Of a layer here none is on it.
ELSEWHERE = torch.device("cpu", 1)
FETCHES = "a layer that fetches its own weights runs between what is replayed"


@pytest.fixture
def pack(install_pack: Any) -> Any:
    return gguf_pack.installed(install_pack)


class Wan:
    """A small one of a file, with and without Compile Model."""

    def __init__(self, host: Host, lab: Lab, pack: Any) -> None:
        self.host, self.lab = host, lab
        self.plain = gguf_pack.load(pack)
        self.ours = lab.compiled(self.plain)
        self.prompt = transformers.conditioning("wan", 13)
        self.latent = transformers.latent("wan", 8, 8)

    def images(self) -> tuple[torch.Tensor, torch.Tensor]:
        eager, ours = sampled(self.host, (self.plain, self.ours), self.prompt, self.latent)
        return eager, ours

    def sample(self) -> torch.Tensor:
        (ours,) = sampled(self.host, (self.ours,), self.prompt, self.latent)
        return ours

    def report(self) -> dict[str, Any]:
        return self.lab.engine.report(self.ours)

    @property
    def layer(self) -> Any:
        return self.plain.model.diffusion_model.get_submodule(LAYER)


@pytest.fixture
def wan(host: Host, shared: Lab, pack: Any) -> Wan:
    return Wan(host, shared, pack)


def test_its_products_unpack_their_weights_by_graphs_and_cut_nothing(wan: Wan) -> None:
    eager, ours = wan.images()
    assert relative(ours, eager) < TOLERANCE
    report = wan.report()
    assert report["calls"]["eager"] == 0 < report["calls"]["compiled"] and not report["eager"]
    offered = wan.lab.engine._shared.choices.products.graphs
    labels = {graph.description.label for graph in offered._offered.values()}
    assert labels >= AIDS and len(offered._good) >= len(AIDS)
    assert not report["misses"], report["misses"]
    whys = {layer["why"] for kind in report["kinds"] for layer in kind["layers"]}
    words = "quantised, GGUF {}: unpacked by Warmgraph at each call"
    assert whys == {words.format(form) for form in ("Q4_0", "Q8_0", "F32")}
    assert not any("norm" in note for note in report["notes"]), "they have no weights in blocks"
    assert not cuts(wan.sample)


def test_another_file_and_a_restart_build_nothing(
    host: Host, pack: Any, shared: Lab, tmp_path: Any
) -> None:
    Wan(host, shared, pack).images()
    jobs = shared.jobs()
    model = gguf_pack.load(pack, seed=1)
    other = shared.compiled(model)
    prompt, latent = transformers.conditioning("wan", 5), transformers.latent("wan", 10, 12)
    eager, ours = sampled(host, (model, other), prompt, latent)
    assert relative(ours, eager) < TOLERANCE and shared.jobs() == jobs
    lab = shared.copy_to(tmp_path)
    try:
        again = lab.compiled(model)
        eager, ours = sampled(host, (model, again), prompt, latent)
        assert relative(ours, eager) < TOLERANCE and lab.jobs() == 0
        assert len(lab.engine._shared.choices.products.graphs._good) == len(AIDS)
    finally:
        lab.engine.close()


def added_to(weight: Any) -> torch.Tensor:
    """Put on a weight what a LoRA is to the pack; returns what that adds."""
    added = 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    weight.patches = [([(1.0, ("diff", (added,)), 1.0, None, None)], "key")]
    return added


def test_a_lora_at_each_call_changes_what_a_graph_unpacked_and_off_again_nothing_is_left_of_it(
    wan: Wan, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wan.images()
    before, jobs = wan.sample(), wan.lab.jobs()
    added_to(wan.layer.weight)
    try:
        eager, ours = wan.images()
        assert relative(ours, eager) < TOLERANCE < relative(ours, before)
        found = cuts(wan.sample)
        assert found == {FETCHES: STEPS}, "the one layer"
        asked = []
        unpack = pack.dequantize_tensor
        monkeypatch.setattr(
            pack, "dequantize_tensor", lambda *given: asked.append(1) or unpack(*given)
        )
        wan.sample()
        assert not asked, "the pack unpacks nothing"
    finally:
        wan.layer.weight.patches = ()
    assert torch.equal(wan.sample(), before) and wan.lab.jobs() == jobs


@pytest.mark.parametrize("patch_dtype", [None, torch.bfloat16], ids=str)
def test_a_patched_product_is_the_packs_to_the_bit(
    wan: Wan, pack: Any, monkeypatch: pytest.MonkeyPatch, patch_dtype: Any
) -> None:
    """Where a LoRA is on the bias, too, and where no graph is there, it is the pack's."""
    monkeypatch.setattr(pack.Ops.Linear, "patch_dtype", patch_dtype, raising=False)
    wan.images()
    layer, products = wan.layer, wan.lab.engine._shared.choices.products
    x = torch.randn(3, layer.in_features)
    plain = layer(x)
    added_to(layer.weight)
    try:
        found = products.call(layer, x)
        assert torch.equal(found, layer(x)) and not torch.equal(found, plain)
        assert gguf.patched_blocks_of(layer) is not None and gguf.blocks_of(layer) is None
        assert torch.equal(products.call(layer, x.double()), layer(x.double()))
        layer.bias.patches = layer.weight.patches
        assert gguf.patched_blocks_of(layer) is None
        assert torch.equal(products.call(layer, x), layer(x))
    finally:
        layer.weight.patches = layer.bias.patches = ()
    assert torch.equal(layer(x), plain)


def test_a_model_with_a_lora_asks_for_graphs_that_unpack(
    host: Host, pack: Any, shared: Lab, tmp_path: Any
) -> None:
    """All of its products are called."""
    Wan(host, shared, pack).images()
    model = gguf_pack.load(pack)
    for layer in model.model.diffusion_model.modules():
        if isinstance(layer, pack.Ops.Linear) and layer.weight.tensor_type in (2, 8):
            added_to(layer.weight)
    prompt, latent = transformers.conditioning("wan", 13), transformers.latent("wan", 8, 8)
    lab = shared.copy_to(tmp_path)
    try:
        compiled = lab.compiled(model)
        eager, ours = sampled(host, (model, compiled), prompt, latent)
        assert relative(ours, eager) < TOLERANCE
        offered = lab.engine._shared.choices.products.graphs._offered.values()
        assert {graph.description.label for graph in offered if graph.loaded is not None} == AIDS
    finally:
        lab.engine.close()


@pytest.mark.parametrize("dtype", ["target", torch.float32], ids=str)
def test_a_loader_may_ask_for_other_steps(host: Host, shared: Lab, pack: Any, dtype: Any) -> None:
    pack.Ops.Linear.dequant_dtype = dtype
    wan = Wan(host, shared, pack)
    eager, ours = wan.images()
    assert relative(ours, eager) < TOLERANCE and not cuts(wan.sample)
    blocks = gguf.blocks_of(wan.layer)
    assert blocks is not None and blocks.steps is (None if dtype == "target" else dtype)


def test_layers_of_a_version_that_is_not_known_are_called(
    host: Host, shared: Lab, install_pack: Any
) -> None:
    pack = gguf_pack.installed(install_pack, TEXT.replace(CALL, CALL + MORE))
    wan = Wan(host, shared, pack)
    assert gguf.blocks_of(wan.layer) is None
    eager, ours = wan.images()
    assert relative(ours, eager) < TOLERANCE
    assert wan.layer.seen[-1] == wan.layer.in_features
    assert cuts(wan.sample)[FETCHES] > STEPS


def test_formats_that_are_not_known_hooks_and_replaced_methods_are_the_packs(wan: Wan) -> None:
    layer = wan.layer
    assert gguf.blocks_of(layer) is not None
    layer.weight.tensor_type = 20  # IQ4_NL
    assert gguf.blocks_of(layer) is None
    layer.weight.tensor_type = 2
    hook = layer.register_forward_hook(lambda *_: None)
    assert gguf.blocks_of(layer) is None
    hook.remove()
    layer.forward = lambda x: x
    assert gguf.blocks_of(layer) is None
    del layer.forward
    assert gguf.blocks_of(layer) is not None


def test_blocks_are_compared_with_the_pack_whatever_other_weights_were(wan: Wan) -> None:
    source = InBlocks(torch.device("cpu"), torch.float32, Streamed(ELSEWHERE, torch.float32, None))
    brought = source.fetch([wan.layer])
    assert brought.name == "packed" and brought.may_be_kept
    weight, bias = brought.pairs[id(wan.layer)]
    live = wan.layer.weight.as_subclass(torch.Tensor)
    assert weight.blocks.data_ptr() == live.data_ptr() and bias is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_blocks_that_lie_elsewhere_are_brought_over(wan: Wan, dtype: torch.dtype) -> None:
    source = InBlocks(ELSEWHERE, dtype, Streamed(ELSEWHERE, dtype, None))
    assert source.takes(wan.layer)
    brought = source.fetch([wan.layer])
    assert brought.name == "packed" and not brought.may_be_kept
    weight, bias = brought.pairs[id(wan.layer)]
    x = torch.randn(3, wan.layer.in_features).to(dtype)
    found = torch.nn.functional.linear(x, weight, bias)
    assert found.dtype is dtype and torch.equal(found, wan.layer(x))


def test_a_piece_never_writes_into_what_is_the_models_own(wan: Wan) -> None:
    """Whoever put another bias there may have kept the first one."""
    source = InBlocks(torch.device("cpu"), torch.float32, Streamed(ELSEWHERE, torch.float32, None))
    brought = source.fetch([wan.layer])
    weight, bias = brought.pairs[id(wan.layer)]
    before = bias.clone()
    kept = InPlace(Fetched([], {LAYER: (weight, bias)}, brought.name, None))
    assert kept.take(Fetched([], {LAYER: (weight, bias)}, brought.name, None))
    assert not kept.take(Fetched([], {LAYER: (weight, bias + 1)}, brought.name, None))
    assert torch.equal(bias, before)


def test_a_layer_that_dynamic_vram_has_is_the_packs(wan: Wan) -> None:
    wan.layer._v = object()
    assert gguf.blocks_of(wan.layer) is None
    del wan.layer._v
    assert gguf.blocks_of(wan.layer) is not None


def test_a_whole_step_finds_its_weights_where_they_lie(wan: Wan) -> None:
    root = wan.plain.model.diffusion_model
    weights = ModelWeights(wan.plain.model, torch.device("cpu"), torch.float32)
    weights.begin_run(), weights.begin_step()
    book = AddressBook(root, weights)
    found = book.look()
    assert found is not None, book.problem
    assert wan.layer.weight.as_subclass(torch.Tensor).data_ptr() in found.pointers
    wan.layer.weight.patches = [([], "key")]
    weights.begin_run()
    assert AddressBook(root, weights).look() is None


def test_other_layers_of_the_pack_are_the_hosts_where_their_weights_are_plain(pack: Any) -> None:
    import comfy.ops

    for name, sizes in (("LayerNorm", (64,)), ("GroupNorm", (4, 64)), ("Conv2d", (4, 64, 3))):
        layer = getattr(pack.Ops, name)(*sizes, dtype=torch.float32, device="cpu")
        hosts = getattr(comfy.ops.manual_cast, name)
        assert gguf.host_class(layer) is hosts and gguf.blocks_of(layer) is None
        shape = layer.weight.shape
        layer.weight = pack.made(layer.weight.detach().reshape(-1), 0, shape)
        assert gguf.host_class(layer) is type(layer)
    assert gguf.host_class(hosts(4, 64, 3)) is hosts
    product = pack.Ops.Linear(64, 64, dtype=torch.float32, device="cpu")
    assert gguf.host_class(product) is pack.Ops.Linear


class Offered:
    """A graph that gives what it is told to."""

    key = "made up"

    def __init__(self, call: Callable[[list[Any]], Any]) -> None:
        self.loaded: Any = SimpleNamespace(call=call)
        self.dropped: str | None = None

    def drop(self, reason: Any) -> None:
        self.dropped, self.loaded = str(reason), None


def test_a_graph_that_unpacks_wrongly_is_dropped_and_its_result_used_for_nothing(
    tmp_path: Path,
) -> None:
    form, dtype = FORMATS["Q8_0"], torch.float32
    blocks = gguf_pack.packed(torch.randn(8, 64), "Q8_0").reshape(-1, form.size)
    weight = Packed(blocks, form, torch.float16, torch.Size((8, 64)), dtype)
    x = torch.randn(3, 64)
    plain = torch.nn.functional.linear(x, weight.unpacked())
    for factor, is_dropped in ((1.0, False), (1.01, True)):
        calls = []

        def call(given: list[Any], factor: float = factor, calls: list[Any] = calls) -> Any:
            calls.append(1)
            return (factor * unpack(given[0], form, torch.float16, dtype),)

        products, graph = Products(tmp_path, "card"), Offered(call)
        products.graphs.offer(("Q8_0", torch.float16, dtype), "cpu", graph)
        for _ in range(2):
            assert torch.equal(products.multiply(x, weight, None), plain)
        assert (graph.dropped is not None) == is_dropped
        assert len(calls) == (1 if is_dropped else 2)
        assert not is_dropped or "differs" in str(graph.dropped)
