"""What two runs of one image say, with us and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runtime.gains import Figure, gain_of
from ..runtime.pace import EAGER
from .words import compared, gain_told


def comparison(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a sentence for each run that can be compared, and why others cannot.

    Args:
        runs: those with us, each with its like (`History.compared`).
    """
    steps, notes = [], set()
    for run in runs:
        plain = run["plain"]
        if run["form"] == EAGER or run["misses"]:
            notes.add("partly")
        if plain is None or None in (run["ms"], plain["ms"]) or run["form"] == EAGER:
            continue
        if run["busy"] or plain["busy"]:
            notes.add("busy")
            continue
        ours, eager = (Figure(each["ms"], each["noise"]) for each in (run, plain))
        told = gain_told(gain_of(ours, eager, run["size"]))
        said = compared(told, run["ms"], plain["ms"]).to_plain()
        image = {name: run[name] for name in ("model", "size", "batch")}
        steps.append({**image, **told, "said": said})
    if not steps and not notes:
        notes.add("no_step")
    return {"steps": steps, "notes": sorted(notes)}
