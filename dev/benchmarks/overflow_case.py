"""The cases of models in float16 that overflow."""

from __future__ import annotations

from typing import Any

from .figure import Figure
from .lab import BUILD_WORKERS, DEFAULT, Lab
from .transformer_kinds import TRANSFORMERS

Result = dict[str, Any]

#: Kinds whose weights are too large where the host bounds what overflows.
BOUNDED = ("flux1", "flux2", "chroma", "hunyuan", "hunyuan_15", "zimage", "lumina2")
#: Kinds of which a prompt's text is: what overflows is nobody's image, and the other prompt is. Not
#: SD3: the host calls none of its wrappers there, by which calls are watched.
OTHERS = ("qwen", "krea", "wan", "wan_image", "anima")
#: How far a call may be from the host's: twice what sound ones differ by.
WRONG = 1e-2
#: Which full-width models' blocks are timed, and how few of them are made.
_FEW = {
    "flux1": {"depth": 1, "depth_single_blocks": 1},
    "zimage": {"n_layers": 1},
}
#: Which weights of those are larger, by how their names end; nothing else overflows: a sum of
#: 10,240 bounded products would, and no form without modulation bounds it.
_LARGER = {
    **dict.fromkeys(("linear2.weight", "txt_mlp.2.weight"), 3000.0),
    **dict.fromkeys(("feed_forward.w1.weight", "feed_forward.w3.weight"), 300.0),
    "feed_forward.w2.weight": 0.01,
    **dict.fromkeys(("txt_mod.lin.weight", "modulation.lin.weight"), 10.0),
}


def fp16_overflow(lab: Lab) -> Result:
    """Small models that overflow beside eager."""
    result = lab.run(
        "half_overflow",
        DEFAULT,
        limit_s=3000 if lab.smoke else 500,
        bounded=["zimage"] if lab.smoke else list(BOUNDED),
        others=["wan"] if lab.smoke else list(OTHERS),
        store=lab.store("half-overflow"),
        workers=lab.workers(BUILD_WORKERS),
    )
    rows, regions = result["rows"], result["regions"]
    wrong = [row for row in rows if not row["error"] <= WRONG]
    worst = {kind: max(row["error"] for row in rows if row["kind"] == kind) for kind in regions}
    left = [kind for kind, each in regions.items() if each["eager"] or each["calls_eager"]]
    return {
        "meaning": "wrong: calls of a model that are not eager's on the same inputs",
        "fp16_overflow_wrong": len(wrong) + len(left),
        "wrong": wrong,
        "not_compiled": left,
        **result,
        "lines": [f"{len(wrong)} of {len(rows)} wrong, worst {worst}, not compiled {left}"],
    }


def fp16_roundings(lab: Lab) -> Result:
    """What rounding as the host does costs full-width blocks, and whether it mends them."""
    costs = lab.run(
        "kept_roundings",
        DEFAULT,
        limit_s=3000 if lab.smoke else 580,
        roots=_roots(lab),
        unets=[lab.kind("sdxl")],
        larger=_LARGER,
        size=8 if lab.smoke else None,
    )["rows"]
    rounding = {name: row for name, row in costs.items() if row["rounds"]}
    wrong = [name for name, row in rounding.items() if not row["error"] <= WRONG]
    return {
        "meaning": "ms: a block in float16 that rounds as eager does, the same without that, and "
        "eager, the least of calls by turns; error: from eager where it overflows",
        "fp16_overflow_wrong": len(wrong),
        "wrong": wrong,
        "rows": costs,
        "lines": [
            *(
                f"{name}: {row['ms']} ms, x{row['ratio']} of the fused one; overflowing "
                f"{row['error']:.1e}, fused {row['error_fused']:.1e}"
                for name, row in rounding.items()
            ),
            f"rounded no other way than ever: {', '.join(costs.keys() - rounding.keys())}",
        ],
    }


def _roots(lab: Lab) -> dict[str, Any]:
    roots: dict[str, Any] = {
        name: (TRANSFORMERS[name].root, {**TRANSFORMERS[name].settings, **few})
        for name, few in _FEW.items()
    }
    if lab.smoke:
        small = {"hidden_size": 256, "num_heads": 2}
        roots = {"flux1": (roots["flux1"][0], {**roots["flux1"][1], **small})}
    return roots


OVERFLOW_FIGURES = {
    "fp16_overflow_wrong": Figure(
        "calls and blocks",
        ("fp16_overflow", "fp16_roundings"),
        lambda *cases: sum(case["fp16_overflow_wrong"] for case in cases),
        "== 0",
        any_of=True,
    ),
}
