"""Put a report into sentences: the few that a node shows, and all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from textwrap import shorten
from typing import Any

from ..building.pacing import BuildProgress
from ..reasons import Reason
from ..runtime.gains import Gain
from ..runtime.pace import EAGER
from ..several_cards.report import card_lines, why_lines
from .lines import Line, line
from .stages import Stage

#: What fits on a node.
MAX_LINES = 5
MAX_REASON = 120
#: From how many seconds on a time is told in minutes.
_MINUTES_FROM = 90


def node_lines(report: dict[str, Any], notes: list[Line]) -> list[Line]:
    """Return what a node shows of its model: the progress of compiling, then the speed, what is not
    compiled, and as many notes as fit.
    """
    head, stands = _headline(report), _stands(report, told=bool(notes))
    if report["stage"] == Stage.COMPILING:  # until then a step's time is worth saying if it is less
        lines = [*stands, *(each for each in head if each.key in ("speed_faster", "unused"))]
    else:
        lines = [*head, *stands]
    lines += [*card_lines(report, duration, line), *_not_compiled(report), *_why_slower(report)]
    room = MAX_LINES - len(lines)
    if len(notes) > room:
        rest = line("more_notes", count=len(notes) - room + 1)
        notes = [*notes[: room - 1], rest]
    return [*lines, *(_short(each) for each in notes)] or [line("nothing")]


def report_lines(report: dict[str, Any], notes: list[Line]) -> list[Line]:
    """Return all that a report says."""
    parts, captured = report["regions"], _captured(report["captured"])
    if not parts["total"]:
        stands = _stands(report, told=bool(notes))
        lines = [*_unused(report), *speed_lines(report), *stands, *captured, *notes]
        return lines or [line("nothing_to_report")]
    parts_by = "parts_learned_by" if report["learned"] else "parts_by"
    parts_line = line(parts_by, **_model(report), backend=report["backend"])
    lines = [*_unused(report), *speed_lines(report), parts_line]
    for entry in report["eager"]:
        told = {"places": entry["places"], "reason": entry["reason"]}
        lines.append(line("not_compiled", total=parts["total"], **told))
        lines.append(line("examples", examples=", ".join(entry["examples"])))
    lines += [*card_lines(report, duration, line), *why_lines(report, line)]
    if report["ready"]:
        lines.append(line("parts_new", count=report["ready"]))
    if report["idle"]:
        lines.append(line("idle", count=report["idle"]))
    building = report["building"]
    if building["done"] < building["total"]:
        lines.append(_building(report))
    lines.append(
        line(
            "graphs",
            builds=report["builds"],
            loads=report["loads"],
            reused=report["reused"],
            misses=len(report["misses"]),
            calls=report["calls"]["compiled"],
        )
    )
    lines += [
        line("missing", kind=miss["kind"], reason=miss["reason"]) for miss in report["misses"]
    ]
    for kind in report["kinds"]:
        for each in kind["layers"]:
            told = {name: each[name] for name in ("count", "why")}
            lines.append(line(f"layers_{each['what']}", kind=kind["kind"], **told))
    lines += captured
    disk, vram = (_mebibytes(report[name], 1) for name in ("disk_bytes", "vram_bytes"))
    lines.append(line("costs", disk=disk, vram=vram, seconds=f"{report['seconds_saved']:.0f}"))
    lines += [line("attention_to_install", **each) for each in report["to_install"]]
    return [*lines, *notes]


def deepcache_lines(report: dict[str, Any]) -> list[Line]:
    """Return what a DeepCache node shows: what the last run did, and the cost of each branch."""
    costs, chosen, wanted = report["costs"], report["branch"], report["wanted_branch"]
    told = {"branch": chosen, "share": f"{costs[chosen]:.0%}"}
    if wanted > chosen:
        branch = line("deepcache_branch_cut", **told, wanted=wanted)
    else:
        branch = line("deepcache_branch", **told)
    listed = ", ".join(f"{number}: {cost:.0%}" for number, cost in enumerate(costs))
    return [*deepcache_run(report), branch, line("deepcache_costs", costs=listed)]


def deepcache_run(report: dict[str, Any]) -> list[Line]:
    """Return what a DeepCache did in its last run."""
    if report["problem"] is not None:
        return [line("deepcache_off", problem=report["problem"])]
    if not report["ran"]:
        return [line("deepcache_waiting")]
    steps = [{"full": each["full"], "shallow": each["shallow"]} for each in report["chunks"]]
    if not steps:
        return [line("deepcache_none")]
    saved = {**_saved(report), "memory": _mebibytes(report["vram_bytes"])}
    if all(each == steps[0] for each in steps):
        return [line("deepcache_ran", **steps[0], **saved)]
    roles = [each["role"] for each in report["chunks"]]
    return [
        line("deepcache_saved", **saved),
        *(_role(role, each) for role, each in zip(roles, steps, strict=True)),
    ]


def _saved(report: dict[str, Any]) -> dict[str, str]:
    return {
        "seconds": f"{report['seconds_saved']:.2f}",
        "whole": f"{report['seconds_without']:.2f}",
    }


def stepcache_lines(report: dict[str, Any]) -> list[Line]:
    """Return what a Step Cache did in its last run."""
    if report["problem"] is not None:
        return [line("stepcache_off", problem=report["problem"])]
    if report["speed"] <= 1 and report["schedule"] != "custom":
        return [line("stepcache_all")]
    if not report["ran"]:
        return [line("stepcache_waiting")]
    steps, computed = report["steps"], report["computed"]
    if not computed:
        return [line("stepcache_none")]
    return [
        line(
            "stepcache_ran",
            computed=computed,
            steps=steps,
            speed=f"{steps / computed:.1f}",
            **_saved(report),
            memory=_mebibytes(report["vram_bytes"]),
        )
    ]


def notes_of(
    said: Iterable[Reason],
    guests: Sequence[tuple[str, str]],
    left: Mapping[tuple[str, Reason], int],
    eager: Mapping[Reason, int],
) -> list[Line]:
    """Return the further lines on a model.

    Args:
        said: the notes of its session.
        guests: layers that others added, by their path, and whose they are.
        left: how many layers within compiled blocks the host runs, by sort and reason.
        eager: how many steps ran as without us, by reason.
    """
    lines = [line("note", note=text) for text in said]
    for whose, count in Counter(whose for _, whose in guests).items():
        if count == 1:
            lines.append(line("added_one", whose=whose))
        else:
            lines.append(line("added", count=count, whose=whose))
    lines += [line(f"left_{what}", count=n, why=why) for (what, why), n in left.items()]
    return [*lines, *(line("steps_eager", count=n, reason=why) for why, n in eager.items())]


def duration(ms: float) -> str:
    """Put the time of a step into words that are the same in all languages."""
    if ms >= 1000:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def building_line(model: str, progress: BuildProgress | dict[str, Any]) -> Line:
    """Say the progress of the builds that a model waits for: the same count on nodes, in the tab
    and while a prompt waits.
    """
    told = progress if isinstance(progress, dict) else progress._asdict()
    values = {"model": model, "done": told["done"], "total": told["total"]}
    seconds = told["seconds_left"]
    if told["paused"]:
        return line("building_paused", **values)
    if seconds is None:
        return line("building", **values)
    if seconds >= _MINUTES_FROM:
        return line("building_left_minutes", **values, minutes=round(seconds / 60))
    return line("building_left", **values, seconds=f"{seconds:.0f}")


def _headline(report: dict[str, Any]) -> list[Line]:
    """A node's first line: that it is in the wrong place or ready, or the time of a step."""
    if report["unused"]:
        return _unused(report)
    if report["stage"] == Stage.READY and (report["ready"] or _was_plain(report)):
        return [line("ready")]
    if report["stage"] == Stage.WAITING and _was_plain(report):
        return []
    return speed_lines(report)


def _unused(report: dict[str, Any]) -> list[Line]:
    """Say that the prompt ended without a run of it."""
    return [line("unused")] if report["unused"] else []


def _was_plain(report: dict[str, Any]) -> bool:
    """Whether the last steps were the host's own."""
    return report["speed"] is not None and report["speed"]["form"] == EAGER


def gain_told(gain: Gain | None) -> dict[str, Any]:
    """Return a gain as JSON-plain data: `times` is its factor as people read it, everywhere."""
    if gain is None:
        return {"factor": None, "times": None, "verdict": None, "factor_size": None}
    times = Decimal(str(gain.factor)).quantize(Decimal("0.1"), ROUND_HALF_UP)
    told = {"factor": gain.factor, "times": str(times), "verdict": gain.verdict.value}
    return {**told, "factor_size": gain.size}


def compared(told: dict[str, Any], ms: float, eager_ms: float) -> Line:
    """Say what a step takes beside one without us; `told`: of their gain."""
    times = {"now": duration(ms), "eager": duration(eager_ms)}
    return line(f"speed_{told['verdict']}", factor=told["times"], **times)


def speed_lines(report: dict[str, Any]) -> list[Line]:
    """Say what a step takes; nothing while it is not known."""
    speed = report["speed"]
    if speed is None:
        return []
    ms, eager_ms = speed["ms"][speed["form"]], speed["ms"].get(EAGER)
    now = duration(ms)
    if speed["form"] == EAGER:
        return [line("speed_eager", now=now)]
    if report["factor"] is None:
        return [line("speed_alone", now=now)]
    if eager_ms is not None:
        return [compared(report, ms, eager_ms)]
    if report["factor_size"] == speed["size"]:  # in calls of other prompts
        return [line("speed_known", factor=report["times"], now=now)]
    return [line("speed_nearest", factor=report["times"], size=report["factor_size"], now=now)]


def _why_slower(report: dict[str, Any]) -> list[Line]:
    """Why a model may be slower, beside what is not compiled."""
    reasons = report["captured"]["not_replayed"]
    if report["stage"] != Stage.SLOWER or not reasons:
        return []
    most = max(reasons, key=lambda reason: reasons[reason])
    return [line("slower_why", reason=_shortened(most))]


def _stands(report: dict[str, Any], *, told: bool) -> list[Line]:
    """How far a model is, unless it only runs as without us and notes have `told` why."""
    standing, total = report["standing"], report["regions"]["total"]
    if standing == "building":
        return [_building(report)]
    if standing == "waiting" and report["idle"] and not report["ready"]:
        return [line("parts_idle", model=report["model"], idle=report["idle"])]
    if standing == "replayed" or (standing == "waiting" and not report["ready"]):
        return [line(standing, model=report["model"])]
    if total:
        return [line("parts_learned" if report["learned"] else "parts", **_model(report))]
    return [] if told or not report["model"] else [line("eager", model=report["model"])]


def _model(report: dict[str, Any]) -> dict[str, Any]:
    parts = report["regions"]
    return {"model": report["model"], "compiled": parts["compiled"], "total": parts["total"]}


def _building(report: dict[str, Any]) -> Line:
    """The progress of what a model waits for: being built, or found and being loaded."""
    building = report["building"]
    if building["done"] < building["total"]:
        return building_line(report["model"], building)
    return line("loading", model=report["model"])


def _not_compiled(report: dict[str, Any]) -> list[Line]:
    """What is not compiled and will not be, in a line."""
    entries = [each for each in report["eager"] if not Reason.plain(each["reason"]).passes]
    total = report["regions"]["total"]
    if not entries or not total:
        return []
    places = sum(each["places"] for each in entries)
    values = {"places": places, "total": total, "reason": _shortened(entries[0]["reason"])}
    if len(entries) == 1:
        return [line("not_compiled", **values)]
    return [line("not_compiled_more", **values, more=len(entries) - 1)]


def _captured(captured: dict[str, Any]) -> list[Line]:
    return [*_calls(captured), *_pieces(captured["pieces"])]


def _pieces(pieces: dict[str, Any]) -> list[Line]:
    """Lines on places that are replayed one by one."""
    if not pieces["replayed"]:
        return []
    memory = _mebibytes(pieces["vram_bytes"])
    places, replayed = pieces["places"], pieces["replayed"]
    return [
        line("pieces", places=places, replayed=replayed, memory=memory),
        *(line("cut", count=n, reason=reason) for reason, n in pieces["cuts"].items()),
        *(line("not_captured", count=n, reason=reason) for reason, n in pieces["refused"].items()),
    ]


def _calls(captured: dict[str, Any]) -> list[Line]:
    if not captured["captures"] and not captured["not_replayed"]:
        return []
    memory = _mebibytes(captured["vram_bytes"])
    sizes, replayed = captured["signatures"], captured["replayed"]
    return [
        line("captured", sizes=sizes, replayed=replayed, memory=memory),
        *(
            line("not_captured", count=n, reason=reason)
            for reason, n in captured["not_replayed"].items()
        ),
    ]


def _role(role: str, steps: dict[str, int]) -> Line:
    if role in ("positive", "negative"):
        return line(f"deepcache_{role}", **steps)
    return line("deepcache_other", role=role, **steps)


def _short(note: Line) -> Line:
    """Return a note that fits on a node; only one that is plain text can be long."""
    if note.key != "note":
        return note
    return line("note", note=_shortened(note.values["note"]))


def _shortened(text: str) -> Reason:
    """Return a reason with its English words shortened; other languages need less room."""
    reason = Reason.plain(text)
    return Reason(shorten(reason, MAX_REASON, placeholder=" ..."), reason.key, reason.values)


def _mebibytes(count: int, digits: int = 0) -> str:
    return f"{count / 2**20:.{digits}f} MiB"
