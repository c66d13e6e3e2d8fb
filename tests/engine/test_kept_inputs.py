"""Packs that keep what they gave a block see in it what the host's block leaves there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.plans.plan import Place
from warmgraph_backends.runtime import verifier
from warmgraph_backends.runtime.faults import Faults
from warmgraph_backends.runtime.region import Region
from warmgraph_backends.runtime.written import leave
from warmgraph_backends.weights.fetching import ModelWeights
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .blocks import Made, tensors
from .lab import TOLERANCE, Lab, call_instead, relative
from .transformer_runs import Run

#: Whose blocks add to what they are given; the others' builds are for `--all`.
KINDS = (
    "flux2",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("flux1", "chroma", "hunyuan")),
)


def step_cache(model: Any, single_blocks: int) -> Any:
    """Keeps what goes into the blocks, to take it from what comes out of them at the end."""
    clone, kept = model.clone(), []

    def begin(given: dict[str, Any]) -> dict[str, Any]:
        kept.append(given["img"])
        return given

    def end(args: Any, extra: Any) -> Any:
        out, before = extra["original_block"](args), kept.pop()
        image = out["img"][:, -before.shape[1] :]
        image += 0.5 * (image - before)
        return out

    clone.set_model_patch(begin, "post_input")
    clone.set_model_patch_replace(end, "dit", "single_block", single_blocks - 1)
    return clone


def _around_first_block(model: Any, change: Callable[[Any, Callable[[], Any]], Any]) -> Any:
    def replacement(args: Any, extra: Any) -> Any:
        out = {}

        def block() -> Any:
            out.update(extra["original_block"](args))
            return out

        image = change(args["img"], block)
        return {**out, "img": image}

    clone = model.clone()
    clone.set_model_patch_replace(replacement, "dit", "double_block", 0)
    return clone


def kept_tensor(model: Any, _: int) -> Any:
    """Gives back the tensor that it kept."""

    def change(kept: torch.Tensor, block: Callable[[], Any]) -> torch.Tensor:
        block()
        return kept

    return _around_first_block(model, change)


def kept_part(model: Any, _: int) -> Any:
    """Keeps a part of it, which has its memory."""

    def change(image: torch.Tensor, block: Callable[[], Any]) -> torch.Tensor:
        part = image[:, 4:]
        out = block()["img"]
        return torch.cat((0.5 * out[:, :4], part), 1)

    return _around_first_block(model, change)


def kept_alias(model: Any, _: int) -> Any:
    """Keeps all of it by another name."""

    def change(image: torch.Tensor, block: Callable[[], Any]) -> torch.Tensor:
        alias = image.detach()
        return 0.5 * block()["img"] + 0.25 * alias

    return _around_first_block(model, change)


def part_of_more(model: Any, _: int) -> Any:
    """Gives the block a part of a larger tensor, and goes on with that."""
    whole = []

    def change(image: torch.Tensor, block: Callable[[], Any]) -> torch.Tensor:
        out, both = block()["img"], whole.pop()
        return 0.5 * out + 0.25 * both[:, :, : out.shape[2]]

    def widen(given: dict[str, Any]) -> dict[str, Any]:
        image = given["img"]
        whole.append(torch.cat((image, image), 2))
        return {**given, "img": whole[-1][:, :, : image.shape[2]]}

    clone = _around_first_block(model, change)
    clone.set_model_patch(widen, "post_input")
    return clone


PACKS = (step_cache, kept_tensor, kept_part, kept_alias, part_of_more)


@pytest.fixture(scope="module", params=KINDS)
def run(host: Host, shared: Lab, request: Any) -> Run:
    run = Run(host, shared, request.param)
    run.sample()
    return run


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.__name__)
def test_a_pack_that_keeps_what_it_gave_a_block_makes_its_image(run: Run, pack: Any) -> None:
    if pack in (step_cache, part_of_more) and run.kind not in ("flux1", "flux2"):
        pytest.skip("has no place before its blocks")
    clone = pack(run.model, len(run.plain.model.diffusion_model.single_blocks))
    run.check(12, 10, model=clone)
    run.check(model=clone)


# --- a block by itself ----------------------------------------------------------------------------


def _inputs(place: Place, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Activations that a place takes."""
    sizes = {"batch": 2, "img": 12, "txt": 5, "tokens": 17}
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn([sizes.get(d, d) for d in spec.dims], generator=draw).to(
            getattr(torch, spec.dtype)
        )
        for spec in place.form.inputs(place.module, str(dtype).removeprefix("torch."))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["flux1", "flux2", "chroma", "hunyuan"])
def test_each_block_that_writes_says_which_inputs_it_gives_back(
    host: Host, kind: str, dtype: torch.dtype
) -> None:
    """In float16 the host's give back a bounded text, in a tensor of its own."""
    plan = plan_model(transformers.load(kind, dtype=dtype).model.diffusion_model)
    places = {p.form.name: p for p in plan.places if p.form.writes}  # type: ignore[union-attr]
    assert len(places) == 2
    for place in places.values():
        form, module = place.form, place.module
        before = _inputs(place, dtype)
        with torch.inference_mode():
            given = [tensor.clone() for tensor in before]
            theirs = Made(given, before, list(tensors(form.reference(module, *given))))
            given = [tensor.clone() for tensor in before]
            results = leave(form, given, form.computed(module, given))
            ours = Made(given, before, list(results))
        assert theirs.written() == ours.written() == set(form.writes)
        assert theirs.same() == ours.same() and theirs.sharing() == ours.sharing()
        for one, other in zip(ours.given, theirs.given, strict=True):
            assert torch.equal(one, other)
        # Whoever goes on with what came back does not write into what was bounded.
        texts = [i for i in form.writes if i not in ours.same()]
        assert texts == ([form.writes[-1]] if dtype is torch.float16 else [])


def _raise(error: BaseException) -> Any:
    raise error


def _moved(call: Any, arguments: Any) -> Any:
    return [result + 1 for result in call(arguments)]


class Alone:
    """The graph of one place of a compiled model, in a region of its own."""

    def __init__(self, run: Run, name: str) -> None:
        scope = run.model.get_attachment("warmgraph").scope
        self.place = next(p for p in scope.plan.places if p.form.name.endswith(name))
        self.graph = copy.copy(scope._of_place[self.place.name].graph)
        self.graph._on_drop = lambda: None
        weights = ModelWeights(run.plain.model, torch.device("cpu"), torch.float32)
        self.region = Region(self.place, self.graph, weights, Faults())
        self.before = _inputs(self.place)
        self.inputs = [tensor.clone() for tensor in self.before]

    def call(self) -> Any:
        """The results, as a tuple, or None."""
        with torch.inference_mode():
            results = self.region(*self.inputs)
        return (results,) if torch.is_tensor(results) else results

    def is_untouched(self) -> bool:
        return all(map(torch.equal, self.inputs, self.before))

    def check_left(self, results: Any, within: float) -> None:
        """The inputs are what the host leaves in them, and come back themselves."""
        form = self.place.form
        with torch.inference_mode():
            references = form.computed(self.place.module, self.before)
        for i, result in enumerate(results):
            assert result is self.inputs[i] and relative(result, references[i]) <= within
        assert all(map(torch.equal, self.inputs[len(results) :], self.before[len(results) :]))


@pytest.mark.parametrize("name", ["double", "single"])
def test_a_graph_that_fails_or_differs_leaves_the_inputs_to_the_host(
    run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Alone(run, name)
    alone.check_left(alone.call(), TOLERANCE)  # compared, and right

    for error in (RuntimeError("broken"), torch.OutOfMemoryError("none left")):
        alone = Alone(run, name)
        call_instead(alone.graph, lambda _, e=error: _raise(e))
        assert alone.call() is None and alone.is_untouched()

    alone = Alone(run, name)
    monkeypatch.setattr(alone.region._verifier, "_computed", lambda _: _raise(error))
    assert alone.call() is None and alone.is_untouched()

    alone = Alone(run, name)
    graph = call_instead(alone.graph, lambda arguments: _moved(graph, arguments))
    alone.check_left(alone.call(), 0.0)  # the host's results on the same inputs
    assert (
        alone.region.declined is not None
        and "differs from ComfyUI's result" in alone.region.declined
    )

    monkeypatch.setattr(verifier, "MAX_COMPARED", 64)  # too large a call to compare all of it
    alone = Alone(run, name)
    call_instead(alone.graph, lambda arguments: _moved(graph, arguments))
    assert alone.call() is None and alone.is_untouched()
