"""What generated code does not check, a region does: made right, or left to the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.kinds.layout import is_laid_out
from warmgraph_backends.plans.plan import Place
from warmgraph_backends.runtime import input_guard
from warmgraph_backends.runtime.faults import Faults
from warmgraph_backends.runtime.region import Region
from warmgraph_backends.runtime.specializations import CallStats
from warmgraph_backends.weights.fetching import ModelWeights
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .probed import Probed

CHANNELS = 64


class Bench:
    """One place of a model with a module of its own, its real graph, and live weights."""

    def __init__(self, probed: Probed, form: str, *, trusted: bool = True) -> None:
        scope = probed.model.get_attachment("warmgraph").scope
        place = next(p for p in scope.plan.places if p.form.name == form)
        self.place = Place(place.name, copy.deepcopy(place.module), place.form)
        self.graph = scope._of_place[place.name].graph
        assert self.graph.loaded is not None
        self.weights = ModelWeights(probed.plain.model, torch.device("cpu"), torch.float32)
        self.account = CallStats()
        self.region = Region(self.place, self.graph, self.weights, Faults(), account=self.account)
        if trusted:
            self.region._verifier.covers = lambda *_: True  # type: ignore[method-assign]

    def declined(self, *inputs: Any) -> str:
        """The reason for which a call is left to the host."""
        self.region.declined = None
        assert self.region(*inputs) is None
        assert self.graph.loaded is not None  # the graph itself is still good
        reason: str | None = self.region.declined
        assert reason
        return reason

    def equals_eager(self, *inputs: Any) -> None:
        self.region.declined = None
        result = self.region(*inputs)
        assert result is not None, self.region.declined
        reference = self.place.form.reference(self.place.module, *inputs)
        assert result.dtype == reference.dtype
        assert is_laid_out(result, self.place.form.layout)
        assert relative(result, reference) <= TOLERANCE


@pytest.fixture
def entry(probed: Probed) -> Bench:
    """Norm and projection: `x [batch, 64, height, width]`."""
    return Bench(probed, "entry")


@pytest.fixture
def up(probed: Probed) -> Bench:
    """Convolution: `(x [batch, 64, height, width], out_height, out_width)`."""
    return Bench(probed, "up")


def image(*size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size or (2, CHANNELS, 6, 5), generator=generator)


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, four bytes off a 16-byte address."""
    base = torch.empty(tensor.numel() + 4)
    start = 1 if base.data_ptr() % 16 == 0 else 0
    view = base[start : start + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    assert view.data_ptr() % 16 and view.is_contiguous()
    return view


MADE_RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "a slice of rows": lambda x: image(2, CHANNELS, 12, 5)[:, :, ::2],
    "a slice of channels": lambda x: image(2, 2 * CHANNELS, 6, 5)[:, CHANNELS:],
    "transposed": lambda x: image(2, CHANNELS, 5, 6).transpose(2, 3),
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "misaligned": _misaligned,
    "one row": lambda x: image(1, CHANNELS, 1, 1),
    "one row, channels last": lambda x: image(1, CHANNELS, 1, 1).to(
        memory_format=torch.channels_last
    ),
}


@pytest.mark.parametrize("layout", MADE_RIGHT)
def test_any_layout_of_an_input_gives_eagers_result(entry: Bench, up: Bench, layout: str) -> None:
    x = MADE_RIGHT[layout](image())
    before = x.clone()
    entry.equals_eager(x)
    up.equals_eager(x, 2 * x.shape[2] - 1, 2 * x.shape[3])
    assert torch.equal(x, before)


class Subclass(torch.Tensor):
    """A tensor of another node's making."""


DECLINED: dict[str, tuple[Callable[[], Any], str]] = {
    "half": (lambda: image().half(), "x must be torch.float32, got torch.float16"),
    "double": (lambda: image().double(), "x must be torch.float32, got torch.float64"),
    "integers": (lambda: image().int(), "x must be torch.float32, got torch.int32"),
    "other width": (lambda: image(2, 32, 6, 5), "x must have size 64 in dim 1, got 32"),
    "other rank": (lambda: image(2, CHANNELS, 30), "with 3 dims"),
    "other device": (lambda: image().to("meta"), "x is on meta"),
    "batch 65": (
        lambda: image(65, CHANNELS, 1, 1),
        "batch must be 1 to 64 for its compiled graph, got 65",
    ),
    "batch 0": (
        lambda: image(0, CHANNELS, 6, 5),
        "batch must be 1 to 64 for its compiled graph, got 0",
    ),
    "1025 rows": (lambda: image(1, CHANNELS, 1025, 1), "height must be 1 to 1024"),
    "no tensor": (lambda: None, "x must be a plain tensor, got a NoneType"),
    "a subclass": (lambda: image().as_subclass(Subclass), "plain tensor, got a Subclass"),
    "more than 32 bits address": (
        lambda: image(1, 1, 1, 1).expand(64, CHANNELS, 1024, 1024),
        "more elements than a compiled graph with 32-bit indices",
    ),
}


@pytest.mark.parametrize("what", DECLINED)
def test_an_input_that_no_layout_makes_right_is_left_to_the_host(entry: Bench, what: str) -> None:
    make, words = DECLINED[what]
    assert words in entry.declined(make())
    needs = {(entry.graph.key, "wide")} if "32-bit" in words else set()
    assert entry.account.needs == needs
    entry.equals_eager(image())  # and the next call is served


def test_what_a_call_of_one_model_needs_is_built_for_that_model_alone(
    lab: Lab, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both share all graphs; a call of one has more elements than 32 bits can count."""
    large, other = Probed(lab, host), Probed(lab, host, seed=1)
    asked: list[Any] = []
    monkeypatch.setattr(
        lab.engine._graphs, "request", lambda graphs, *_, **__: asked.extend(graphs)
    )
    with monkeypatch.context() as patch:
        patch.setattr(input_guard, "MAX_ELEMENTS", 0)
        large.sample()
    reasons = {entry["reason"] for entry in large.report()["eager"]}
    assert reasons == {"more elements than a compiled graph with 32-bit indices can address"}
    wide = set(asked)  # when its run ended
    assert wide and all(graph.description.wide for graph in wide)
    asked.clear()
    for _ in range(2):
        other.check()
    kinds = other.report()["kinds"]
    assert asked == [] and not any(kind["variants"] for kind in kinds)
    large.sample()
    assert set(asked) <= wide
    found = [kind["variants"] for kind in large.report()["kinds"]]
    assert found.count({"wide": "missing"}) == len(wide)
    asked.clear()
    lab.compiled(large.plain)  # the node runs again, on the same model
    assert wide <= set(asked)


def test_an_integer_out_of_its_range_is_left_to_the_host(up: Bench) -> None:
    assert "out_height must be 1 to 1024" in up.declined(image(), 2048, 10)
    assert "out_width must be 1 to 1024" in up.declined(image(), 12, 0)


# --- weights --------------------------------------------------------------------------------


def _set(module: Any, tensor: torch.Tensor | None) -> None:
    module._parameters["weight"] = (
        None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
    )


BAD_WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of another shape": lambda w: w[:, :32].clone(),
    "with one row more": lambda w: torch.cat([w, w[:1]]),
    "transposed in memory": lambda w: w.t().contiguous().t(),
    "a slice of a wider one": lambda w: torch.cat([w, w], dim=1)[:, : w.shape[1]],
    "misaligned": _misaligned,
}


@pytest.mark.parametrize("what", BAD_WEIGHTS)
def test_a_weight_that_is_not_what_the_graph_takes_is_never_passed_to_it(
    entry: Bench, what: str
) -> None:
    entry.equals_eager(image())
    weight = entry.place.module.proj_in.weight
    _set(entry.place.module.proj_in, BAD_WEIGHTS[what](weight.detach()))
    entry.weights.begin_run()
    reason = entry.declined(image())
    assert "weights are not what its compiled graph takes: weight must be a contiguous" in reason
    _set(entry.place.module.proj_in, weight.detach())
    entry.weights.begin_run()
    entry.equals_eager(image())


def test_a_convolutions_weight_in_channels_last_is_never_passed_to_the_graph(up: Bench) -> None:
    weight = up.place.module.conv.weight.detach()
    _set(up.place.module.conv, weight.to(memory_format=torch.channels_last))
    assert "must be a contiguous" in up.declined(image(), 12, 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_weight_of_another_dtype_is_cast_as_the_host_casts_it(
    entry: Bench, dtype: torch.dtype
) -> None:
    module = entry.place.module.proj_in
    module.comfy_cast_weights = True  # as the host sets it on a model that it casts
    _set(module, module.weight.detach().to(dtype))
    entry.equals_eager(image())


def test_a_weight_replaced_between_two_steps_is_the_one_that_counts(entry: Bench) -> None:
    """A LoRA, or another checkpoint's weights: kept lists must not outlive the parameter."""
    x = image()
    entry.weights.begin_step()
    entry.equals_eager(x)
    module = entry.place.module.proj_in
    _set(module, module.weight.detach() * 3)
    entry.weights.begin_step()
    entry.equals_eager(x)
    module.weight.mul_(0.5)  # written in place
    entry.weights.begin_step()
    entry.equals_eager(x)
    _set(module, BAD_WEIGHTS["transposed in memory"](module.weight.detach()))
    entry.weights.begin_step()
    assert "must be a contiguous" in entry.declined(x)


def test_a_model_with_such_a_weight_makes_eagers_image_and_names_the_reason(
    probed: Probed,
) -> None:
    mine = Probed(probed.lab, probed.host)
    layer = next(m for m in mine.unet.modules() if type(m).__name__ == "SpatialTransformer")
    mine.check()
    _set(layer.proj_in, BAD_WEIGHTS["transposed in memory"](layer.proj_in.weight.detach()))
    mine.sample()
    assert max(call.error for call in mine.probe.calls) <= TOLERANCE
    [entry] = mine.report()["eager"]
    assert "weights are not what its compiled graph takes" in entry["reason"]


# --- what the inputs have in common ---------------------------------------------------------------


def test_an_input_that_eager_broadcasts_is_left_to_the_host(probed: Probed) -> None:
    """A graph would read the other images' embeddings past the end of the one that is there."""
    residual = Bench(probed, "residual")
    module = residual.place.module
    x, emb = image(4, module.channels, 6, 5), image(4, module.emb_channels)
    residual.equals_eager(x, emb)
    assert residual.declined(x, emb[:1]) == "batch is 4 in x and 1 in emb"
    residual.equals_eager(x[:1], emb[:1])


def test_a_context_of_another_batch_is_left_to_the_host(probed: Probed) -> None:
    block = Bench(probed, "block")
    width = block.place.module.norm1.normalized_shape[0]
    depth = block.place.module.attn2.to_k.weight.shape[1]
    x, context = image(4, 30, width), image(4, 7, depth)
    block.equals_eager(x, context)
    assert block.declined(x, context[:2]) == "batch is 4 in x and 2 in context"


def test_a_form_is_good_only_beside_the_forms_that_it_came_with(probed: Probed) -> None:
    residual = Bench(probed, "residual")
    module = residual.place.module
    for batch in (1, 4):
        residual.equals_eager(
            image(batch, module.channels, 6, 5), image(batch, module.emb_channels)
        )
    residual.declined(image(4, module.channels, 6, 5), image(1, module.emb_channels))
    residual.declined(image(1, module.channels, 6, 5), image(4, module.emb_channels))


def test_a_form_that_was_good_is_looked_at_again_at_another_address(entry: Bench) -> None:
    good = image()
    for _ in range(2):
        entry.equals_eager(good)
        entry.equals_eager(_misaligned(good))


# --- when memory runs out -------------------------------------------------------------------------


def test_no_room_for_all_weights_of_a_region_leaves_the_call_to_the_host(
    probed: Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region wants them all at once, eager wants one."""
    import comfy.ops

    residual = Bench(probed, "residual")
    for part in residual.place.module.modules():
        if hasattr(part, "comfy_cast_weights"):
            for name, weight in part._parameters.items():
                if weight is not None:
                    wide = torch.nn.Parameter(weight.detach().double(), requires_grad=False)
                    part._parameters[name] = wide
    before, calls = comfy.ops.cast_bias_weight, []

    def cast(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room for the third")
        return before(*args, **kwargs)

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", cast)
    module = residual.place.module
    inputs = image(2, module.channels, 6, 5), image(2, module.emb_channels)
    assert "out of memory" in residual.declined(*inputs)


def test_no_room_to_compare_leaves_the_call_to_the_host_and_lets_weights_go(
    probed: Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Bench(probed, "entry", trusted=False)
    released: list[int] = []
    fetch = entry.region._weights.fetch
    monkeypatch.setattr(
        entry.region._weights, "fetch", lambda: fetch()._replace(release=lambda: released.append(1))
    )

    def no_room(*inputs: Any) -> Any:
        raise torch.OutOfMemoryError("no room for the corner")

    monkeypatch.setattr(entry.region._verifier, "sample", no_room)
    assert "out of memory" in entry.declined(image())
    assert released == [1]


def test_nothing_is_learnt_from_a_result_without_a_finite_value(probed: Probed) -> None:
    entry = Bench(probed, "entry", trusted=False)
    result = entry.region(torch.full_like(image(), float("nan")))
    assert result is not None and entry.account.compared == 0 and entry.graph.loaded is not None
    entry.equals_eager(image())
    assert entry.account.compared == 1
