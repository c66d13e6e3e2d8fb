"""The case of graphs that were built without the card."""

from __future__ import annotations

from typing import Any

from .lab import BUILD_WORKERS, OFF, Lab

Result = dict[str, Any]

#: The card that is pretended: H100 and H200.
TARGET = "sm_90"


def prebuilt_without_card(lab: Lab, kind: str = "sdxl", crossbuilt: str | None = None) -> Result:
    """One model's graphs, built on the card and by a process that does not see it.

    Args:
        crossbuilt: a store that was filled elsewhere; None fills one here.
    """
    given = {"model": lab.file(kind), "kind": lab.kind(kind)}
    workers = lab.workers(BUILD_WORKERS)
    native = lab.store("prebuilt_native", empty=True)
    on_card = lab.run("prebuild", limit_s=400, store=native, workers=workers, **given)
    without = None
    if crossbuilt is None:
        crossbuilt = lab.store("prebuilt_crossbuilt", empty=True)
        without = lab.run(
            "prebuild",
            OFF,
            limit_s=600,
            pretended=None if lab.smoke else TARGET,
            store=crossbuilt,
            workers=workers,
            **given,
        )
    pairs = lab.run("prebuilt_pairs", limit_s=300, native=native, crossbuilt=crossbuilt, **given)
    lines = [
        f"{name}: {row['ms']} ms x {row['places']}; {row['rel_l2']}"
        for name, row in pairs["rows"].items()
    ]
    return {
        "meaning": "ms: one call at the sizes that kernels are tuned for, the least of several",
        "keys": on_card["keys"],
        "same_keys": without is None or on_card["keys"] == without["keys"],
        **pairs,
        "lines": [*lines, f"crossbuilt / native {pairs['crossbuilt_ratio']}"],
    }
