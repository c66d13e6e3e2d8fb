"""Graphs that were built without the card beside those that were built on it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ..measure import elapsed_ms, mark, rel_l2
from ..pack import brief, open_engine
from .common import load_kind
from .common import partial as report

_ROUNDS = 15


def prebuild(*, model: str, kind: str, store: str, workers: int = 0) -> dict[str, Any]:
    """Build what a model needs and sample nothing, which needs no card.

    Returns:
        {"keys": by part, "report"}
    """
    engine = open_engine(Path(store), workers=workers)
    ours = engine.compile_model(load_kind(kind, Path(model)), when_missing="wait")
    report = engine.report(ours)
    engine.close()
    keys = {f"{n} {each['kind']}": each["key"] for n, each in enumerate(report["kinds"])}
    return {"keys": keys, "report": brief(report)}


def prebuilt_pairs(*, model: str, kind: str, native: str, crossbuilt: str) -> dict[str, Any]:
    """Load each graph of a model from two stores, compare both with the host's maths and time them.

    Args:
        native: a store that was filled on this card.
        crossbuilt: one that was filled without it.

    Returns:
        {"rows": {part: {"ms": {"native", "crossbuilt"}, "rel_l2": likewise, "places"}},
        "crossbuilt_ratio": all places' time, crossbuilt by native}
    """
    engine = open_engine(Path(native))
    other = open_engine(Path(crossbuilt))
    ours = engine.compile_model(load_kind(kind, Path(model)), when_missing="never")
    rows: dict[str, Any] = {}
    for each in engine._objects.carried(ours).scope.serving:
        stores = {"native": engine._store, "crossbuilt": other._store}
        rows[each.label] = {**_row(each.graph, stores), "places": len(each.here)}
        report(rows)
    engine.close()
    other.close()
    total = {
        name: sum(row["ms"][name] * row["places"] for row in rows.values())
        for name in ("native", "crossbuilt")
    }
    return {"rows": rows, "crossbuilt_ratio": round(total["crossbuilt"] / total["native"], 3)}


def _row(graph: Any, stores: dict[str, Any]) -> dict[str, Any]:
    """One kind's graph from each store, at the sizes that kernels are tuned for."""
    from warmgraph_backends.families.catalogue import code_of
    from warmgraph_backends.worker.export import export

    description = graph.description
    program = export(code_of(description))
    weights, inputs = program.example()
    expected = program.run(weights, inputs)
    named = {spec.name: weight for spec, weight in zip(program.weights, weights, strict=True)}
    calls, errors = {}, {}
    for name, store in stores.items():
        file = store.load(graph.key)
        if file is None:
            raise RuntimeError(f"the {name} store must have {description.label}, {graph.key}")
        # Each graph takes them in an order of its own: a layer's, which hangs on the host's mode.
        theirs = [named[spec.name] for spec in file.manifest.facts.weights]
        calls[name] = partial(_call, graph.backend.load(file.payload), theirs, inputs)
        found = calls[name]()
        errors[name] = max(rel_l2(a, b) for a, b in zip(found, expected, strict=True))
    return {"ms": least_ms(calls), "rel_l2": errors}


def _call(graph: Any, weights: Any, inputs: Any) -> Any:
    return graph([*weights, *inputs])  # it empties the list


def least_ms(calls: dict[str, Any]) -> dict[str, float]:
    """Return the least of several calls by turns, in ms by the device's clock."""
    import torch

    from warmgraph_backends.kernels.gpu_time import by_turns

    if torch.cuda.is_available():
        return by_turns(calls, are_short=True, rounds=_ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            begin = mark()
            call()
            times[name].append(elapsed_ms(begin, mark()))
    return {name: min(each) for name, each in times.items()}
