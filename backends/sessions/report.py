"""What runs compiled, what does not and why: plain data, and the same in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from ..building.builder import Builder, BuildProgress
from ..building.claims import BY_ANOTHER_SERVER
from ..cuda_graphs.replays import Replays
from ..deepcache.cache import DeepCache
from ..runtime.graph import State
from ..runtime.kind import Kind
from ..runtime.pace import EAGER, Speed
from ..runtime.session import Session

_EXAMPLES = 3
#: By which factor a step must be quicker, or slower, to be called so.
_FASTER = 1.05


def model_report(session: Session | None, builder: Builder, note: str | None) -> dict[str, Any]:
    """Return the report of one MODEL, VAE or CONTROL_NET as JSON-plain data.

    Args:
        session: what is attached to it; None gives a report that holds only `note`.
    """
    building = builder.progress()._asdict()
    if session is None:
        return {**_EMPTY, "notes": [note] if note else []}
    scope, steps = session.scope, session.eager_calls
    total = len(scope.plan.places) + len(scope.plan.outside)
    eager = scope.eager_places()
    ours = session.all_graphs
    ready = [g for g in ours if g.state is State.READY]
    new = [g for g in ready if session.is_new(g)]
    return {
        "id": session.id,
        "model": session.name,
        "backend": session.backend.name,
        "when_missing": session.options.when_missing.value,
        "graphs": session.options.graphs,
        "regions": {"total": total, "compiled": total - len(eager), "eager": len(eager)},
        "eager": _by_reason(eager),
        "kinds": [_kind(kind) for kind in scope.kinds],
        "builds": sum(g.source == "built" for g in new),
        "loads": sum(g.source == "loaded" for g in new),
        "reused": len(ready) - len(new),
        "calls": {
            "compiled": sum(each.compiled_calls for each in session.scopes),
            "eager": sum(steps.values()),
        },
        "captured": _captured([each.replays for each in session.scopes]),
        "standing": _standing(session, total, total - len(eager)),
        "speed": _speed(session.pace.speed()),
        "misses": [
            {
                "kind": g.description.label,
                "reason": BY_ANOTHER_SERVER if g.built_elsewhere else g.reason or g.state.value,
            }
            for g in ours
            if g.state is not State.READY
            # Of its own sizes a model has graphs on top of those that serve them already.
            and not (g.description.is_special and g.state is State.MISSING)
        ],
        "disk_bytes": sum(g.bytes or 0 for g in ready),
        "vram_bytes": sum(g.binary_bytes for g in ready if g.description.device == "cuda"),
        "seconds_saved": round(
            sum(g.build_seconds or 0.0 for g in ready if g.source == "loaded"), 1
        ),
        # The count is the server's: a session shows it while it waits for something itself.
        "building": building if any(g.is_pending for g in ours) else _NOTHING_BUILT,
        "notes": [
            *session.notes,
            *_guests(scope.plan.guests),
            *_left(scope.kinds),
            *(f"{n} steps eager: {r}" for r, n in steps.items()),
        ],
    }


def speed_lines(report: dict[str, Any]) -> list[str]:
    """Put what a step takes into a line; none while it is not known."""
    speed = report["speed"]
    return [] if speed is None else [_speed_line(speed)]


def strict_problem(report: dict[str, Any]) -> str | None:
    """Say what of a MODEL would run eager; None when nothing would."""
    if not report["regions"]["total"]:
        return "; ".join(report["notes"]) or "nothing of this model is compiled"
    lines = [f"{e['places']} places: {e['reason']}" for e in report["eager"][:4]]
    return f"parts would run eager: {'; '.join(lines)}" if lines else None


def render_text(report: dict[str, Any]) -> str:
    """Put a report into words, a line each."""
    regions, cache = report["regions"], report.get("deepcache")
    cached = [] if cache is None else [deepcache_text(cache)]
    if not regions["total"]:
        lines = [*speed_lines(report), *_captured_lines(report), *report["notes"], *cached]
        return "\n".join(lines) or "nothing to report"
    lines = [
        *speed_lines(report),
        f"{report['model']}: {regions['compiled']} of {regions['total']} regions compiled "
        f"({report['backend']})",
    ]
    for entry in report["eager"]:
        lines.append(f"  eager: {entry['places']} x {entry['reason']}")
        lines.append(f"         {', '.join(entry['examples'])}")
    building = report["building"]
    if building["done"] < building["total"]:
        left = building["seconds_left"]
        rest = "" if left is None else f", about {left:.0f} s left"
        lines.append(f"building: {building['done']} of {building['total']}{rest}")
    lines.append(
        f"graphs: {report['builds']} built, {report['loads']} loaded, {report['reused']} in use "
        f"before, {len(report['misses'])} missing; {report['calls']['compiled']} calls compiled"
    )
    for miss in report["misses"]:
        lines.append(f"  missing: {miss['kind']}: {miss['reason']}")
    lines += _captured_lines(report)
    lines.append(
        f"disk {report['disk_bytes'] / 2**20:.1f} MiB, VRAM {report['vram_bytes'] / 2**20:.1f} MiB "
        f"(kernels; weights are the host's own), {report['seconds_saved']:.0f} s of compiling saved"
    )
    lines += [*report["notes"], *cached]
    return "\n".join(lines)


def deepcache_report(cache: DeepCache) -> dict[str, Any]:
    """Return what a DeepCache is set to and what its last run did, as JSON-plain data."""
    options, tally = cache.options, cache.tally
    return {
        "id": cache.id,
        "schedule": options.schedule.value,
        "interval": options.interval,
        "branch": cache.branch.number,
        "wanted_branch": options.branch,
        "costs": [round(cost, 4) for cost in cache.costs],
        "side": cache.side,
        "ran": tally is not None,
        "chunks": [] if tally is None else tally.chunks,
        "seconds_saved": 0.0 if tally is None else round(tally.seconds_saved, 3),
        "vram_bytes": 0 if tally is None else tally.feature_bytes,
        "problem": cache.problem,
    }


def deepcache_text(report: dict[str, Any]) -> str:
    """Put what a DeepCache did in its last run into a line."""
    if report["problem"] is not None:
        return f"DeepCache: {report['problem']}"
    if not report["ran"]:
        return "DeepCache: what it did is shown here once a run has ended"
    counts = ", ".join(
        f"{chunk['role']} {chunk['full']} full + {chunk['shallow']} shallow"
        for chunk in report["chunks"]
    )
    return (
        f"DeepCache, last run: {counts or 'no calls of the UNet'}; about "
        f"{report['seconds_saved']:.2f} s saved, {report['vram_bytes'] / 2**20:.0f} MiB of features"
    )


def _speed_line(speed: dict[str, Any]) -> str:
    now, eager = speed["ms"][speed["form"]], speed["ms"].get(EAGER)
    if speed["form"] == EAGER:
        return f"{_duration(now)} a step, as without this node"
    if eager is None:
        return f"{_duration(now)} a step"
    if eager >= _FASTER * now:
        factor = eager / now
        return f"{factor:.1f}x faster: {_duration(now)} a step instead of {_duration(eager)}"
    if now >= _FASTER * eager:
        return f"{_duration(now)} a step; without this node {_duration(eager)}"
    return f"{_duration(now)} a step, about as without this node"


def _duration(ms: float) -> str:
    if ms >= 1000:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def _speed(speed: Speed | None) -> dict[str, Any] | None:
    if speed is None:
        return None
    ms = {form: round(time, 3) for form, time in speed.ms.items()}
    return {"form": speed.form, "size": speed.size, "ms": ms}


def _standing(session: Session, total: int, compiled: int) -> str:
    """Say in a word how far a session is."""
    if compiled < total and any(graph.is_pending for graph in session.graphs):
        return "building"
    if compiled:
        return "compiled" if compiled == total else "partly"
    replays = [each.replays for each in session.scopes if each.replays is not None]
    if any(each.replayed for each in replays):
        return "replayed"
    return "waiting" if replays and session.pace.speed() is None else "eager"


def _captured_lines(report: dict[str, Any]) -> list[str]:
    captured = report["captured"]
    if not captured["captures"] and not captured["not_replayed"]:
        return []
    return [
        f"CUDA graphs: {captured['signatures']} sizes captured, {captured['replayed']} steps "
        f"replayed, {captured['vram_bytes'] / 2**20:.0f} MiB",
        *(f"  {n} steps not: {reason}" for reason, n in captured["not_replayed"].items()),
    ]


def _captured(each: Sequence[Replays | None]) -> dict[str, Any]:
    """The captured calls of a root module and its variants, which share their memory."""
    replays = [one for one in each if one is not None]
    if not replays:
        return _NOTHING_CAPTURED
    return {
        "signatures": sum(one.captured for one in replays),
        "captures": sum(one.captures for one in replays),
        "replayed": sum(one.replayed for one in replays),
        "vram_bytes": replays[0].vram_bytes,
        "not_replayed": dict(sum((Counter(dict(one.reasons)) for one in replays), Counter())),
    }


def _kind(kind: Any) -> dict[str, Any]:
    graph = kind.graph
    known = graph is not None
    return {
        "kind": kind.label,
        "places": len(kind.places),
        "state": graph.state.value if known else "eager",
        "wide": kind.wide.state.value if kind.wide is not None else None,
        "reason": graph.reason if known else kind.reason,
        "key": graph.key if known else None,
        "source": graph.source if known else None,
        "build_seconds": graph.build_seconds if known else None,
        "load_ms": graph.load_ms if known else None,
        "bytes": graph.bytes if known else None,
    }


def _left(kinds: Sequence[Kind]) -> list[str]:
    """Say which layers within compiled blocks are the host's."""
    layers: Counter[tuple[str, str]] = Counter()
    for kind in kinds:
        layers.update(kind.left)
    return [
        f"{count} {what} run as without this node ({why}); what lies around them is compiled"
        for (what, why), count in layers.items()
    ]


def _guests(layers: Sequence[tuple[str, str]]) -> list[str]:
    """What other packs added to the model: theirs to run, and none of its regions."""
    return [
        f"{count} {'layer' if count == 1 else 'layers'} that others added run as they are: {whose}"
        for whose, count in Counter(whose for _, whose in layers).items()
    ]


def _by_reason(eager: list[tuple[str, str]]) -> list[dict[str, Any]]:
    places: dict[str, list[str]] = defaultdict(list)
    for place, reason in eager:
        places[reason].append(place)
    return [
        {"reason": reason, "places": len(names), "examples": names[:_EXAMPLES]}
        for reason, names in sorted(places.items(), key=lambda item: -len(item[1]))
    ]


_NOTHING_CAPTURED: dict[str, Any] = {
    "signatures": 0,
    "captures": 0,
    "replayed": 0,
    "vram_bytes": 0,
    "not_replayed": {},
}
_NOTHING_BUILT = BuildProgress(0, 0, [], None, 0, False)._asdict()
_EMPTY: dict[str, Any] = {
    "building": _NOTHING_BUILT,
    "id": "",
    "model": "",
    "backend": "eager",
    "when_missing": "",
    "graphs": "",
    "regions": {"total": 0, "compiled": 0, "eager": 0},
    "eager": [],
    "kinds": [],
    "builds": 0,
    "loads": 0,
    "reused": 0,
    "calls": {"compiled": 0, "eager": 0},
    "captured": _NOTHING_CAPTURED,
    "standing": "eager",
    "speed": None,
    "misses": [],
    "disk_bytes": 0,
    "vram_bytes": 0,
    "seconds_saved": 0.0,
}
