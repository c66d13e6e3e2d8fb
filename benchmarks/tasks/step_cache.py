"""ComfyUI's EasyCache and LazyCache around captured calls: which of their steps are replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..host import Size
from ..measure import rel_l2
from ..pack import open_engine
from .common import CAPTURE_STEPS, load_kind, partial, sample

STEPS = 20
#: Leaves some two steps in five out.
THRESHOLD = 0.2


def step_cache(*, model: str, kind: str, store: str, size: list[int], form: str) -> dict[str, Any]:
    """Final latents under each step cache, before Compile Model and behind it, against eager's.

    Returns:
        {"rows": [{"name", "error" (relative L2), "max_abs_diff", "steps", "computed" (calls of the
        diffusion model without us), "replayed", "share" (replayed of computed), "reasons"}]}
    """
    from comfy_extras import nodes_easycache

    engine = open_engine(Path(store))
    eager = load_kind(kind, Path(model))
    ours = engine.compile_model(eager, when_missing="wait", form=form)
    target = Size(*size)
    rows: list[dict[str, Any]] = []
    sample(eager, kind, target, steps=CAPTURE_STEPS)  # see `captured.exact`
    for name in ("EasyCacheNode", "LazyCacheNode"):
        node = getattr(nodes_easycache, name)

        def cached(given: Any, node: Any = node) -> Any:
            return node.execute(given, THRESHOLD, 0.15, 0.95, False).args[0]

        computed = _Counter()
        expected = sample(computed.around(cached(eager)), kind, target, steps=STEPS)
        for order, patched in (
            ("before it", cached(ours)),
            ("behind it", engine.compile_model(cached(eager), when_missing="wait", form=form)),
        ):
            sample(patched, kind, target, steps=STEPS)  # captured, and compared
            before = engine.report(patched)["captured"]["replayed"]
            found = sample(patched, kind, target, steps=STEPS)
            report = engine.report(patched)["captured"]
            replayed = report["replayed"] - before
            rows.append(
                {
                    "name": f"Compile Model {order}: {name}",
                    "error": rel_l2(found, expected),
                    "max_abs_diff": float((found - expected).abs().max()),
                    "steps": STEPS,
                    "computed": computed.calls,
                    "replayed": replayed,
                    "share": replayed / computed.calls,
                    "reasons": list(report["not_replayed"]),
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
