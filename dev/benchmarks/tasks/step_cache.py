"""ComfyUI's EasyCache and LazyCache around captured calls: which of their steps are replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..host import Size
from ..measure import Stopwatch, rel_l2
from ..pack import open_engine, settle, settle_second_graphs
from .common import BUILD_LIMIT_S, CAPTURE_STEPS, load_kind, partial, sample

STEPS = 20
#: Of SDXL: leaves some two steps in five out.
THRESHOLD = 0.2
#: Runs of a model before the one that counts: graphs are compared, then calls captured.
WARM_RUNS = 2


def step_cache(
    *,
    model: str,
    kind: str,
    store: str,
    size: list[int],
    forms: Sequence[str],
    nodes: Sequence[str] = ("EasyCacheNode", "LazyCacheNode"),
    threshold: float = THRESHOLD,
    workers: int = 0,
) -> dict[str, Any]:
    """Final latents under each step cache, before Compile Model and behind it, against eager's.

    Args:
        size: [width, height].
        forms: of graphs, as Compile Model takes them.
        nodes: classes of step caches in the host's `comfy_extras.nodes_easycache`.
        threshold: of their nodes; a larger one leaves out more steps.

    Returns:
        {"rows": [{"name", "form", "error" (relative L2), "max_abs_diff", "steps", "computed" (calls
        of the diffusion model without us), "replayed", "share" (replayed of computed), "reasons",
        "eager_seconds", "seconds"}]}
    """
    from comfy_extras import nodes_easycache

    engine = open_engine(Path(store), workers=workers)
    eager = load_kind(kind, Path(model))
    target = Size(*size)
    rows: list[dict[str, Any]] = []
    sample(eager, kind, target, steps=CAPTURE_STEPS)  # see `captured.exact`
    for name in nodes:
        node = getattr(nodes_easycache, name)

        def cached(given: Any, node: Any = node) -> Any:
            return node.execute(given, threshold, 0.15, 0.95, False).args[0]

        computed = _Counter()
        watch = Stopwatch()
        expected = sample(computed.around(cached(eager)), kind, target, steps=STEPS)
        eager_seconds = watch.seconds()
        for form in forms:
            ours = engine.compile_model(eager, when_missing="wait", form=form)
            if form != "exact":  # the host's own calls, captured: nothing is built
                sample(ours, kind, target, steps=1)
                settle(engine, ours, limit_s=BUILD_LIMIT_S)
                settle_second_graphs(engine, ours, limit_s=BUILD_LIMIT_S)
            for order, patched in (
                ("before it", cached(ours)),
                ("behind it", engine.compile_model(cached(eager), when_missing="wait", form=form)),
            ):
                for _ in range(WARM_RUNS):
                    sample(patched, kind, target, steps=STEPS)
                before = engine.report(patched)["captured"]["replayed"]
                watch = Stopwatch()
                found = sample(patched, kind, target, steps=STEPS)
                seconds = watch.seconds()
                report = engine.report(patched)["captured"]
                replayed = report["replayed"] - before
                rows.append(
                    {
                        "name": f"Compile Model {order}: {name}",
                        "form": form,
                        "error": rel_l2(found, expected),
                        "max_abs_diff": float((found - expected).abs().max()),
                        "steps": STEPS,
                        "computed": computed.calls,
                        "replayed": replayed,
                        "share": round(replayed / computed.calls, 3),
                        "reasons": list(report["not_replayed"]),
                        "eager_seconds": round(eager_seconds, 3),
                        "seconds": round(seconds, 3),
                    }
                )
                partial({"rows": rows})
    engine.close()
    return {"rows": rows}


class _Counter:
    """Counts the calls of a diffusion model, innermost."""

    def __init__(self) -> None:
        self.calls = 0

    def around(self, model: Any) -> Any:
        """Return a clone of a MODEL whose calls are counted."""
        from comfy.patcher_extension import WrappersMP

        def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return executor(*args, **kwargs)

        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "benchmarks.counter", counted)
        return clone
