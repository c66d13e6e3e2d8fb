"""The run that OneDiff's users did, replayed: eager and ours, and whole-model `torch.compile`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .lab import DEFAULT, OFF, ChildError, Lab

ROW_LIMIT_S = 240.0
MEANING = (
    "seconds: wall time of KSampler (20 steps, cfg 7; LCM 8 steps, denoise 0.5) and VAE Decode, "
    "with the nodes' own time in a process's first row, without boot and reading of files; again: "
    "the same row made a second time (eager, ours: after all rows and builds; torch.compile: at "
    "once); peak_mib: PyTorch's peak of allocated bytes and the weights that dynamic VRAM holds; "
    "builds: graphs compiled for that row (ours: asked for by it, and built beside the images); "
    "eager_calls: of region_calls, how many no graph served; torch.compile: static shapes, dynamic "
    "VRAM off, as the host's node has it for a model"
)
Result = dict[str, Any]
Rows = dict[str, dict[str, Any]]


class Row(NamedTuple):
    """One image of the run."""

    name: str
    width: int
    height: int
    batch: int = 1
    image: bool = False


ROWS = (
    Row("1024x1024", 1024, 1024),
    Row("1024x1152", 1024, 1152),
    Row("1536x1536", 1536, 1536),
    Row("512x2048", 512, 2048),
    Row("2048x512", 2048, 512),
    Row("720x960", 720, 960),
    Row("1024x1024 batch 2", 1024, 1024, 2),
    Row("img2img, LCM", 1024, 1024, 1, True),
)
RESTART = Row("restart, load, 1024x1024", 1024, 1024)


def users_run(lab: Lab) -> Result:
    """Eager, then ours with an empty store, each in a process and in one after the restart."""
    store, user = lab.store("users-run", empty=not lab.smoke), lab.folder("users-run")
    runs: dict[str, Result] = {}
    for name, restarted in (("eager", "eager"), ("ours", "loaded")):
        mine = {"store": store, "user": user, "workers": lab.workers(0)} if name == "ours" else {}
        limits = {"limit_s": 3000 if lab.smoke else 400}
        if lab.smoke:
            mine["build_limit_s"] = 2400.0
        first = _child(lab, DEFAULT, name, ROWS, again_at_once=False, **limits, **mine)
        again = _child(lab, DEFAULT, restarted, [RESTART], **limits, **mine)
        runs[name] = {**first, "rows": {**first["rows"], **again["rows"]}, "restarted": again}
    rows = {name: run["rows"] for name, run in runs.items()}
    ours = runs["ours"]
    later = [row["builds"] for row in list(ours["rows"].values())[1:]]
    result: Result = {
        "meaning": MEANING,
        "total_seconds": {name: total(made.values()) for name, made in rows.items()},
        "again_seconds": {name: total(_again(made)) for name, made in rows.items()},
        "builds_after_first_row": sum(later)
        + sum(row["again"]["builds"] for row in ours["rows"].values()),
        "runs": runs,
    }
    built, save, loaded = ours["built"], ours["save"], ours["restarted"]["reports"]
    lines = [
        *markdown(rows),
        f"{built['graphs']} graphs, the last one {built['all_built_seconds']} s after the nodes "
        f"ran; {result['builds_after_first_row']} builds after the first row; region calls eager: "
        f"{_eager_calls(ours['rows'].values())}, again {_eager_calls(_again(ours['rows']))}",
        f"save: {save['graphs']} graphs, {save['mb']} MB linked {save['linked_seconds']} s after "
        f"the image, {save['missing']} missing; load: "
        + ", ".join(f"{name} {report['loads']}" for name, report in loaded.items()),
    ]
    return {**result, "lines": lines}


def users_run_rival(name: str, rows: Sequence[Row], *, restart: bool) -> Callable[[Lab], Result]:
    """A case that compiles whole models, row by row; one stopped at its limit is a result.

    Args:
        name: of the case; its processes share their compiler caches, as a user's do.
        restart: end with the first image in a new process.
    """

    def run(lab: Lab) -> Result:
        caches = lab.folder(f"{name}-caches")
        made: Rows = {}
        # On a CPU each row compiles for minutes: a smoke run makes the first and the last.
        left = wanted = [rows[0], rows[-1]] if lab.smoke else list(rows)
        while left:
            made |= _rival_rows(lab, left, caches)
            left = [row for row in wanted if row.name not in made]
        if restart:
            made |= _rival_rows(lab, [RESTART], caches)
        return {
            "meaning": MEANING,
            "limit_s": ROW_LIMIT_S,
            "rows": made,
            "lines": markdown({"torch.compile": made}),
        }

    return run


def _rival_rows(lab: Lab, rows: Sequence[Row], caches: str) -> Rows:
    """What one process made of these rows: at least the first is in it, if only with a reason."""
    limit = ROW_LIMIT_S * (8 if lab.smoke else 1)
    try:
        limits = {"limit_s": 3 * limit * len(rows), "silence_s": limit}
        return dict(_child(lab, OFF, "torch_compile", rows, caches=caches, **limits)["rows"])
    except ChildError as failure:
        made: Rows = dict(failure.partial.get("rows", {}))
        if lab.left() < 5:
            return {row.name: {"seconds": None, "not_run": str(failure)} for row in rows} | made
        at_work = failure.partial.get("row")
        if at_work is None:
            raise
        reason = {"over": limit} if failure.stopped else {"failed": str(failure)}
        return made | {at_work: made.get(at_work, {"seconds": None, **reason})}


def _child(
    lab: Lab, flags: tuple[str, ...], contender: str, rows: Sequence[Row], **options: Any
) -> Result:
    quick = {"steps": 2, "lcm_steps": 2} if lab.smoke else {}
    return lab.run(
        "users_run",
        flags,
        contender=contender,
        model=lab.model("sdxl"),
        vae=lab.model("vae"),
        kind=lab.kind("sdxl"),
        vae_kind=lab.kind("vae"),
        rows=[
            {
                "name": row.name,
                "size": [*lab.pixels(row.width, row.height), row.batch],
                "image": row.image,
            }
            for row in rows
        ],
        **quick,
        **options,
    )


def total(rows: Iterable[dict[str, Any]]) -> float | str | None:
    """Seconds of all rows; a text where one ran over its limit, None where one was not made."""
    rows = list(rows)
    if any(row.get("seconds") is None and "over" not in row for row in rows) or not rows:
        return None
    seconds = round(sum(row["seconds"] or row["over"] for row in rows), 2)
    return f"> {seconds:.0f}" if any("over" in row for row in rows) else seconds


def markdown(runs: dict[str, Rows]) -> list[str]:
    """A Markdown table: seconds of a row's first and second image, builds and peak of VRAM."""
    head = ["", *(f"{name}, s (again)" for name in runs), "builds", "peak VRAM, GiB (again)"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in dict.fromkeys(name for rows in runs.values() for name in rows):
        made = [rows.get(name, {}) for rows in runs.values()]
        cells = [name, *map(_time, made)]
        cells += [" / ".join(map(show, made)) for show in (_builds, _peak)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def joint_table(folder: Path) -> list[str]:
    """The table of all contenders, from those of the case files that are there."""
    runs: dict[str, Rows] = {}
    for name in ("users_run", "users_run_rival_a", "users_run_rival_b"):
        path = folder / f"{name}.json"
        case = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if name == "users_run":
            runs |= {who: run["rows"] for who, run in case.get("runs", {}).items()}
        elif case.get("ok"):
            runs["torch.compile"] = {**runs.get("torch.compile", {}), **case["rows"]}
    return markdown(runs) if runs else []


def _again(rows: Rows) -> list[dict[str, Any]]:
    return [row.get("again", {}) for row in rows.values()]


def _eager_calls(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    return " of ".join(
        str(sum(row[key] for row in rows)) for key in ("eager_calls", "region_calls")
    )


def _time(row: dict[str, Any]) -> str:
    if row.get("seconds") is None:
        return f"> {row['over']:.0f}" if "over" in row else "failed" if "failed" in row else "-"
    again = row.get("again")
    return f"{row['seconds']:.2f}" + (f" ({again['seconds']:.2f})" if again else "")


def _builds(row: dict[str, Any]) -> str:
    return str(row.get("builds", "-"))


def _peak(row: dict[str, Any]) -> str:
    peaks = [made.get("peak_mib") for made in (row, row.get("again", {}))]
    if peaks[0] is None:
        return "-"
    first, again = (None if peak is None else f"{peak / 1024:.1f}" for peak in peaks)
    return f"{first} ({again})" if again else str(first)
