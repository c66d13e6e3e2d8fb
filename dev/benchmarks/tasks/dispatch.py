"""What our own code costs the processor: at each place, and at each learned block."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import transformers
from ..host import Size
from ..pack import brief, open_engine
from .common import Pair, sample
from .learned import serve_all

CALLS = 20  # of a place in a row
SERIES = 15


def dispatch(
    *, model: str, kind: str, store: str, size: list[int], workers: int = 0
) -> dict[str, Any]:
    """Microseconds of the processor at each place beyond those within its graph.

    A place is called as the host's forward calls it, on inputs as a step brings them, with the
    weights of a run.

    Returns:
        {"places", "median_us", "worst_us", "forms": {form: median}}
    """
    engine = open_engine(Path(store), workers=workers, captured=False)
    pair = Pair(engine, Path(model))
    pair.settle(kind, Size(*size))
    scope = pair.ours.get_attachment("warmgraph").scope
    spent: dict[str, list[float]] = {}
    for region, inputs in _record(scope, pair, kind, Size(*size)):
        us = _beyond_graphs([region], lambda: region(*inputs))  # noqa: B023
        spent.setdefault(region.graph.description.form, []).append(us)
    scope.end_run()
    engine.close()
    return {"places": sum(map(len, spent.values())), **_told(spent, "forms")}


def block_dispatch(
    *, name: str, path: str, store: str, size: list[int], workers: int = 0
) -> dict[str, Any]:
    """Microseconds of the processor at each learned block beyond those within its graphs, from the
    host's call of the block on: what the call is, and what the place does.

    Args:
        name: of a model that no family describes.
        path: of its file, written now if it is not there.
        size: as `transformers.sample` takes it.

    Returns:
        {"blocks", "median_us", "worst_us", "sorts": {class: median}, "report"}
    """
    engine = open_engine(Path(store), workers=workers, captured=False)
    model = engine.compile_model(transformers.load(name, Path(path)), when_missing="background")
    serve_all(engine, name, model, size)
    scope = model.get_attachment("warmgraph").scope
    spent: dict[str, list[float]] = {}
    for module, forward, args, kwargs, regions in _blocks(scope, name, model, size):
        us = _beyond_graphs(regions, lambda: forward(*args, **kwargs))  # noqa: B023
        spent.setdefault(type(module).__name__, []).append(us)
    scope.end_run()
    report = brief(engine.report(model))
    engine.close()
    return {"blocks": sum(map(len, spent.values())), **_told(spent, "sorts"), "report": report}


def _blocks(scope: Any, name: str, model: Any, size: list[int]) -> list[tuple[Any, ...]]:
    """Each block of a step that its graphs served, within a run that goes on: its module, what is
    in its forward's place, with what that was called, and the regions that it called.
    """
    seen: dict[tuple[Any, str], tuple[Any, ...]] = {}
    now: list[Any] = []

    def note(region: Any, _: tuple[Any, ...]) -> None:
        now.append(region)

    def noting(module: Any, word: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            now.clear()
            result = forward(*args, **kwargs)
            if now:
                seen[module, word] = args, kwargs, list(now)
            return result

        return noted

    def noting_set() -> Any:
        made = make_set()
        placed = [(m, word, noting(m, word, call)) for m, word, call in made.installed]
        return made._replace(installed=placed)

    forwards = scope.forwards
    make_set = forwards._make_set
    forwards._make_set = noting_set
    try:
        with _noting(scope, note):
            transformers.sample(name, model, size, steps=3)
    finally:
        forwards._make_set = make_set
    plain = make_set().installed
    return [(m, call, *seen[m, word]) for m, word, call in plain if (m, word) in seen]


def _record(scope: Any, pair: Pair, kind: str, size: Size) -> list[tuple[Any, tuple[Any, ...]]]:
    """Each region of a step with what it was called with, within a run that goes on."""
    sample(pair.ours, kind, size, steps=1)
    seen: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def note(region: Any, inputs: tuple[Any, ...]) -> None:
        seen[region.place.name] = region, inputs

    with _noting(scope, note):
        # The first step brings weights over; a short one after it says that nothing need wait.
        sample(pair.ours, kind, size, steps=3)
    return list(seen.values())


class _Noted:
    """A region of which each call is noted."""

    def __init__(self, region: Any, note: Callable[[Any, tuple[Any, ...]], None]) -> None:
        self._region, self._note = region, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)

    def __call__(self, *inputs: Any, **brought: Any) -> Any:
        self._note(self._region, inputs)
        return self._region(*inputs, **brought)


@contextlib.contextmanager
def _noting(scope: Any, note: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """Note each call of a region meanwhile; a run goes on afterwards."""
    forwards = scope.forwards
    region = forwards._region
    forwards._region = lambda place: (found := region(place)) and _Noted(found, note)
    forwards._version = -1
    try:
        yield
    finally:
        forwards._region = region
        forwards._version = -1
    scope.begin_run()
    scope._bound.weights.begin_step()


def _told(spent: dict[str, list[float]], sorts: str) -> dict[str, Any]:
    """The median and the worst of all, and the median of each sort."""
    every = [us for values in spent.values() for us in values]
    return {
        "median_us": round(statistics.median(every), 2),
        "worst_us": round(max(every), 2),
        sorts: {sort: round(statistics.median(values), 2) for sort, values in spent.items()},
    }


def _beyond_graphs(regions: list[Any], call: Callable[[], Any]) -> float:
    """The processor's time of a call of these regions beyond that within their graphs, the best of
    many series: others' work comes and goes.
    """
    import torch

    before = Counter({region: region.calls for region in regions})
    best = float("inf")
    with torch.inference_mode(), _clocked(regions) as within:
        for _ in range(SERIES):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            spent = 0.0
            for _ in range(CALLS):
                within.clear()
                begin = time.perf_counter()
                results = call()
                spent += time.perf_counter() - begin - sum(within)
                del results  # whoever calls it gives their memory back
            best = min(best, spent / CALLS)
    wanted = {region: CALLS * SERIES * n for region, n in Counter(regions).items()}
    if Counter({region: region.calls for region in before}) != before + Counter(wanted):
        raise RuntimeError("what is called must be served by its graphs to be measured")
    return best * 1e6


@contextlib.contextmanager
def _clocked(regions: list[Any]) -> Iterator[list[float]]:
    """Meanwhile each call of these regions' graphs adds its seconds to the list."""
    within: list[float] = []

    def clocked(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def timed(values: list[Any]) -> Any:
            begin = time.perf_counter()
            results = call(values)
            within.append(time.perf_counter() - begin)
            return results

        return timed

    before = {region.graph: region.graph.status for region in regions}
    for graph, status in before.items():
        loaded = status.loaded
        graph.status = status._replace(loaded=loaded._replace(call=clocked(loaded.call)))
    try:
        yield within
    finally:
        for graph, status in before.items():
            graph.status = status
