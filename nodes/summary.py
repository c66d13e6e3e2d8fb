"""Say a model's report in the few lines that fit on a node."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

from ..backends.sessions.report import deepcache_text, speed_lines

MAX_REASONS = 3
MAX_REASON = 120


def summary_text(report: dict[str, Any]) -> str:
    """Return what a node shows of its model: how quick it is, regions, builds that run, what is
    eager and why.
    """
    regions, speed = report["regions"], speed_lines(report)
    if not regions["total"]:
        return "\n".join([*speed, *report["notes"]]) or "nothing to compile"
    compiled = f"{regions['compiled']} of {regions['total']} regions compiled"
    lines = [*speed, f"{report['model']}: {compiled}"]
    building = building_text(report["building"])
    if building:
        lines.append(building)
    reasons = report["eager"]
    for entry in reasons[:MAX_REASONS]:
        reason = shorten(entry["reason"], MAX_REASON, placeholder=" ... (see Graph Report)")
        lines.append(f"{entry['places']} eager: {reason}")
    if len(reasons) > MAX_REASONS:
        lines.append(f"{len(reasons) - MAX_REASONS} more reasons in Graph Report")
    return "\n".join([*lines, *report["notes"]])


def deepcache_summary(report: dict[str, Any]) -> str:
    """Return what a DeepCache node shows: what the last run did, and what each branch costs."""
    costs, chosen = report["costs"], report["branch"]
    first = f"branch {chosen} of 0 to {len(costs) - 1}"
    if report["wanted_branch"] > chosen:
        first += f" ({report['wanted_branch']} is beyond this model)"
    listed = ", ".join(f"{number}: {cost:.0%}" for number, cost in enumerate(costs))
    costs_line = (
        f"a shallow step's arithmetic at {report['side']}x{report['side']}, by branch: {listed}"
    )
    return "\n".join([deepcache_text(report), first, costs_line])


def building_text(building: dict[str, Any]) -> str:
    """Return `building 3 of 23, about 40 s left`, or "" when nothing is being built."""
    if building["done"] >= building["total"]:
        return ""
    left = building["seconds_left"]
    rest = "" if left is None else f", about {left:.0f} s left"
    return f"building {building['done']} of {building['total']}{rest}"
