"""What a worker makes of a region whose parts are called: as the host's maths around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.kinds.tolerance import relative_l2
from warmgraph_backends.operators.live_parts import LivePart, is_norm, is_product
from warmgraph_backends.plans.plan import Place, Plan
from warmgraph_backends.plans.region_code import RegionCode
from warmgraph_backends.plans.specs import describe_live, describe_place
from warmgraph_backends.worker.export import export
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE


def live_of(place: Place) -> Iterator[LivePart]:
    """All products; all that can be called."""
    kept = place.form.children
    parts = {
        path: part
        for path, part in place.module.named_modules()
        if path and (kept is None or path.partition(".")[0] in kept)
    }
    whole = tuple(sorted(set(place.form.parts) & parts.keys()))
    norms = [path for path, part in parts.items() if is_norm(part)]
    outside = [path for path in norms if not path.startswith(tuple(f"{p}." for p in whole))]
    if any(map(is_product, parts.values())):
        yield LivePart(True, ())
    if whole or outside:
        yield LivePart(True, tuple(sorted((*whole, *outside))))


@pytest.mark.parametrize("kind", ["narrow15", "wan", "wan_image"])
def test_what_is_traced_around_live_parts_is_what_the_host_computes(host: Host, kind: str) -> None:
    model = host.load(kind)[0] if kind.startswith("narrow") else transformers.load(kind)
    plan = plan_model(model.model.diffusion_model)
    assert isinstance(plan, Plan)
    forms: dict[str, Place] = {}
    for place in plan.places:
        forms.setdefault(place.form.name, place)
    tried = 0
    for place in forms.values():
        plain = describe_place(place, plan, dtype=torch.float32, device="cpu")
        for live in live_of(place):
            program = export(RegionCode(describe_live(place, plain, live), place.form))
            for sizes in ({}, {symbol.name: 5 for symbol in plain.symbols}):
                weights, inputs = program.example(_small(plain, sizes))
                with torch.no_grad():
                    results: Any = program.graph_module(*weights, *inputs)
                    for ours, theirs in zip(results, program.run(weights, inputs), strict=True):
                        assert relative_l2(ours, theirs) < TOLERANCE, (place.form.name, live)
            tried += 1
    assert tried > len(forms)


def _small(description: Any, sizes: dict[str, int]) -> dict[str, int]:
    """Sizes that eager is done with at once."""
    return sizes or {symbol.name: max(symbol.minimum, 3) for symbol in description.symbols}
