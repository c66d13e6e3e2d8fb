"""The host's EasyCache and LazyCache lie around our steps, whatever the order of the nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warmgraph_backends.cuda_graphs.signatures import read_call
from warmgraph_backends.families.catalogue import FAMILIES
from warmgraph_backends.runtime.scope import Scope
from warmgraph_tools.inprocess import Host

from .lab import Lab

STEPS = 6
Order = Callable[[Any, Callable[[Any], Any], Callable[[Any], Any]], Any]
ORDERS: dict[str, Order] = {
    "Compile Model first": lambda model, ours, cache: cache(ours(model)),
    "Compile Model behind": lambda model, ours, cache: ours(cache(model)),
}


def _cached(host: Host, name: str) -> Callable[[Any], Any]:
    def apply(model: Any) -> Any:
        given = {"reuse_threshold": 0.5, "start_percent": 0.1, "end_percent": 0.95}
        return host.node(name, model=model, **given, verbose=False)[0]

    return apply


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["EasyCache", "LazyCache"])
def test_what_a_step_cache_computes_is_a_whole_call_of_ours(
    host: Host, make_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch, name: str, order: str
) -> None:
    model, clip, _ = host.load("narrowxl")
    prompt, cache = host.encode(clip, "a cat"), _cached(host, name)
    lab = make_lab(empty=True)  # nothing is compiled: the bits are the host's
    made: list[tuple[tuple[Any, ...], str | None]] = []
    call = Scope.call

    def seen(self: Any, run: Any, args: Any, kwargs: Any, *, no_capture: str | None) -> Any:
        made.append((tuple(args), no_capture))
        return call(self, run, args, kwargs, no_capture=no_capture)

    computed: list[int] = []
    hook = model.model.diffusion_model.time_embed.register_forward_hook(
        lambda *_: computed.append(1)
    )
    try:
        eager = host.sample(cache(model), prompt, prompt, steps=STEPS, cfg=1.0)
        alone = len(computed)
        assert 1 < alone < STEPS, "the cache leaves some steps out"
        compiled = ORDERS[order](
            model, lambda given: lab.compiled(given, when_missing="never"), cache
        )
        monkeypatch.setattr(Scope, "call", seen)
        image = host.sample(compiled, prompt, prompt, steps=STEPS, cfg=1.0)
    finally:
        hook.remove()
    assert torch.equal(image, eager)
    assert len(computed) == 2 * alone
    assert [no_capture for _, no_capture in made] == [None] * alone, "each could be captured"
    unread = {unread for family in FAMILIES if family.roots for unread in [family.unread]}
    for args, _ in made:
        assert any("easycache" in value for value in args if isinstance(value, dict))
        for names in unread:
            read_call(args, {}, names)  # raises where it could not be captured


def test_another_wrapper_beside_the_cache_is_still_named(
    host: Host, make_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy.patcher_extension import WrappersMP

    model, clip, _ = host.load("narrowxl")
    prompt = host.encode(clip, "a cat")
    made: list[str | None] = []
    call = Scope.call

    def seen(self: Any, *args: Any, no_capture: str | None) -> Any:
        made.append(no_capture)
        return call(self, *args, no_capture=no_capture)

    def passed_on(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(*args, **kwargs)

    compiled = make_lab(empty=True).compiled(model, when_missing="never")
    both = _cached(host, "EasyCache")(compiled)
    both.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "tests.other", passed_on)
    monkeypatch.setattr(Scope, "call", seen)
    host.sample(both, prompt, prompt, steps=STEPS, cfg=1.0)
    assert set(made) == {"another node wraps the model's own call"}
