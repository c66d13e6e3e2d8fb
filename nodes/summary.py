"""Say a model's report in the few lines that fit on a node."""

from __future__ import annotations

from typing import Any

MAX_REASONS = 3


def summary_text(report: dict[str, Any]) -> str:
    """Return what a node shows of its model: regions, builds that run, what is eager and why."""
    regions = report["regions"]
    name = report.get("model") or "model"
    lines = []
    if regions["total"]:
        lines.append(f"{name}: {regions['compiled']} of {regions['total']} regions compiled")
    building = building_text(report.get("building") or {})
    if building:
        lines.append(building)
    reasons = report.get("eager") or []
    lines += [f"{entry['places']} eager: {entry['reason']}" for entry in reasons[:MAX_REASONS]]
    if len(reasons) > MAX_REASONS:
        lines.append(f"{len(reasons) - MAX_REASONS} more reasons in Graph Report")
    lines += report.get("notes") or []
    return "\n".join(lines) or f"{name}: nothing to compile"


def building_text(building: dict[str, Any]) -> str:
    """Return `building 3 of 23, about 40 s left`, or "" when nothing is being built."""
    done, total = building.get("done", 0), building.get("total", 0)
    if done >= total:
        return ""
    left = building.get("seconds_left")
    return f"building {done} of {total}" + (f", about {left:.0f} s left" if left else "")
