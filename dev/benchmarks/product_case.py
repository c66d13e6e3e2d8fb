"""The case of products by int8 weights."""

from __future__ import annotations

import math
from typing import Any

from .lab import BUILD_WORKERS, Lab

Result = dict[str, Any]

#: Rows, columns and depth of people's models: MiniMax H3's and Wan 14B's videos, LTX-2.3's, Flux 1
#: and Z-Image at 1024x1024.
SHAPES = {
    "H3 queries, keys and values": (15700, 21504, 5376),
    "H3 attention's last": (15700, 5376, 7168),
    "H3 feed-forward": (15700, 28672, 5376),
    "H3 feed-forward's last": (15700, 5376, 14336),
    "Flux single block": (4608, 21504, 3072),
    "Flux single block's last": (4608, 3072, 15360),
    "Z-Image queries, keys and values": (4224, 11520, 3840),
    "Wan feed-forward": (14040, 13824, 5120),
    "LTX feed-forward": (14080, 16384, 4096),
}
#: Of a smoke run, by which the graph is tuned, too.
_SMOKE_SHAPES = {"small": (64, 96, 256), "odd": (17, 48, 512)}
_SMOKE_EXAMPLE = {"rows": 8, "columns": 3, "width": 16}


def int8_product(lab: Lab) -> Result:
    """Each shape in each way, and the geometric mean of what ours gains over the library."""
    shapes = _SMOKE_SHAPES if lab.smoke else SHAPES
    result = lab.run(
        "int8_product",
        limit_s=400,
        store=lab.store("int8_product"),
        shapes={name: list(shape) for name, shape in shapes.items()},
        workers=lab.workers(BUILD_WORKERS),
        example=_SMOKE_EXAMPLE if lab.smoke else None,
    )
    rows = result["rows"]
    ratio = mean_ratio(rows)
    lines = [
        *(
            f"{name}: {row['ms']} ms, x{row['ratio']}; alone {row['tops']} TOPS; {row['rel_l2']}"
            for name, row in rows.items()
        ),
        f"geometric mean x{ratio}, {result['tile']}, built in {result['build_seconds']} s",
    ]
    return {
        "meaning": "ms: bfloat16 rows rotated, quantised and multiplied by a ConvRot weight; "
        "alone: rows that are int8 already; ratio: library / ours; medians, by the GPU's clock",
        "int8_product_ratio": ratio,
        **result,
        "lines": lines,
    }


def mean_ratio(rows: dict[str, Result]) -> float:
    """The geometric mean of the shapes' ratios."""
    logs = [math.log(row["ratio"]) for row in rows.values()]
    return round(math.exp(sum(logs) / len(logs)), 3)
