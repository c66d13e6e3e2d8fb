"""What runs compiled, what does not and why, as plain data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ..building.builder import Builder
from ..building.claims import BY_ANOTHER_SERVER
from ..building.pacing import BuildProgress
from ..contract import WhenMissing
from ..cuda_graphs.pieces import Pieces
from ..cuda_graphs.replays import Replays
from ..device.gpu import is_gpu
from ..graphs.compiled_graph import CompiledGraph, State
from ..reasons import Reason, joined, of
from ..runtime.kind import Kind
from ..runtime.last_run import PartCounts, parts
from ..runtime.pace import Speed
from ..runtime.session import AttachedBy, ModelCopy, Session, standing_of
from ..several_cards.report import cards_of
from .left_words import in_words
from .lines import Line, in_english, plain, told
from .stages import Stage, stage_of
from .words import gain_told, node_lines, notes_of, report_lines, speed_lines

_EXAMPLES = 3


def model_report(session: Session | None, builder: Builder, note: Reason | None) -> dict[str, Any]:
    """Return the report of one MODEL, VAE or CONTROL_NET as JSON-plain data.

    Args:
        session: what is attached to it; None: a report with only `note`.
    """
    building = builder.progress()._asdict()
    if session is None:
        return _in_words(_EMPTY, notes_of([note] if note else [], [], {}, {}))
    scope, steps, parts = session.scope, session.eager_calls, session.parts()
    compiled, eager = parts.compiled + parts.ready, parts.eager
    ours = session.all_graphs
    is_building = any(_is_awaited(g) for g in ours)
    if not is_building:  # the server's count: shown while this model waits for something itself
        building = _NOTHING_BUILT
    ready = _by_key(g for g in ours if g.state is State.READY)
    loaded = [(g.description.device, g.loaded) for g in ready if g.loaded is not None]
    everywhere = [(g.description.device, g.loaded) for g in ours if g.loaded is not None]
    new = [g for g in ready if session.is_new(g)]
    standing, speed = _standing(session, parts), session.pace.speed()
    report = {
        "id": session.id,
        "model": session.name,
        **_attached_by(session.attached_by),
        "backend": session.backend.name,
        "when_missing": session.options.when_missing.value,
        "graphs": session.options.graphs,
        # Those that the last run called, or that the next one may.
        "regions": {
            "total": compiled + len(eager),
            "compiled": compiled,
            "eager": len(eager),
        },
        "ready": parts.ready,
        "idle": parts.idle,
        "unused": session.is_unused,
        "eager": _by_reason(eager),
        "kinds": [_kind(kind) for kind in scope.serving],
        "cards": cards_of(session.cards, _parts_of, told),
        "builds": sum(g.source == "built" for g in new),
        "loads": sum(g.source == "loaded" for g in new),
        "reused": len(ready) - len(new),
        "calls": {
            "compiled": sum(each.compiled_calls for each in session.scopes),
            "eager": sum(steps.values()),
        },
        "captured": {
            **_captured([each.replays for each in session.scopes]),
            "pieces": _pieces([each.pieces for each in session.scopes]),
        },
        "learned": session.lesson is not None and bool(scope.plan.places),
        "standing": standing,
        "speed": _speed(speed),
        **_gained(session, parts, speed, standing, building),
        "misses": [
            {
                "kind": g.description.label,
                "reason": BY_ANOTHER_SERVER if g.status.elsewhere else g.reason or g.state.value,
            }
            for g in _by_key(g for g in ours if g.state is not State.READY)
        ],
        "disk_bytes": sum(each.bytes or 0 for _, each in loaded),
        "vram_bytes": sum(each.binary_bytes for device, each in everywhere if is_gpu(device)),
        "seconds_saved": round(
            sum(each.build_seconds or 0.0 for _, each in loaded if each.source == "loaded"), 1
        ),
        "building": building,
        "to_install": [
            {"kernel": each.title, "package": each.package}
            for each in scope.choices.could_install()
        ],
    }
    notes = [*session.notes, *scope.choices.notes()]
    return _in_words(report, notes_of(notes, scope.plan.guests, _left(scope.serving), steps))


def _in_words(report: dict[str, Any], notes: list[Line]) -> dict[str, Any]:
    """Return a report with its text: for a node, and in full, also in English for callers without a
    language.
    """
    whole = report_lines(report, notes)
    return {
        **report,
        "notes": [_reason_of(each) for each in notes],
        "said": plain(speed_lines(report)),
        "lines": plain(node_lines(report, notes)),
        "whole": plain(whole),
        "text": in_english(whole),
    }


def strict_problem(report: dict[str, Any]) -> Reason | None:
    """Say what of a MODEL would run as without us; None if nothing would."""
    if not report["regions"]["total"]:
        notes = [note.cause for note in report["notes"]]
        return joined(notes) if notes else of("nothing_compiled")
    found = [of("places", count=e["places"], why=e["reason"]) for e in report["eager"][:4]]
    return of("would_run_normally", why=found) if found else None


def _reason_of(note: Line) -> Reason:
    return Reason.plain(note.values["note"] if note.key == "note" else note.text)


def _attached_by(attached: AttachedBy | None) -> dict[str, Any]:
    """Which nodes of which workflow a session belongs to, and whether a setting put ours there."""
    if attached is None:
        return _OF_NO_NODE
    nodes = [{"workflow": attached.workflow, "node": node} for node in attached.nodes]
    return {"nodes": nodes, "by": "setting" if attached.by_setting else "node"}


def _speed(speed: Speed | None) -> dict[str, Any] | None:
    if speed is None:
        return None
    ms = {form: round(time, 3) for form, time in speed.ms.items()}
    return {"form": speed.form, "size": speed.size, "ms": ms}


def _gained(
    session: Session,
    parts: PartCounts,
    speed: Speed | None,
    standing: str,
    building: dict[str, Any],
) -> dict[str, Any]:
    """How far a session is, and the gain of its compiled steps."""
    gain = session.pace.gain()
    stage = stage_of(
        parts,
        speed,
        gain,
        standing=standing,
        is_building=building["done"] < building["total"],
        is_unused=session.is_unused,
        is_left=session.options.when_missing is not WhenMissing.NEVER
        and any(graph.state is State.MISSING for graph in session.graphs),
    )
    if stage not in (Stage.FASTER, Stage.SAME, Stage.SLOWER, Stage.COMPILING):
        gain = None
    return {"stage": stage.value, **gain_told(gain)}


def _standing(session: Session, parts: PartCounts) -> str:
    """Say in one word how far a session is."""
    wanted = [kind.graph for kind in session.scope.serving if kind.graph is not None]
    if parts.eager and any(map(_is_awaited, wanted)):
        return "building"
    if parts.compiled:
        return "partly" if parts.eager else "compiled"
    if parts.ready or parts.idle:
        return "waiting"
    replays = [each.replays for each in session.scopes if each.replays is not None]
    if any(each.replayed for each in replays):
        return "replayed"
    return "waiting" if replays and session.pace.speed() is None else "eager"


def _parts_of(card: ModelCopy) -> PartCounts:
    return parts(*standing_of(card.scope, card.counts))


def _by_key(graphs: Iterable[CompiledGraph]) -> list[CompiledGraph]:
    """One graph of several that cards loaded from one file."""
    return list({graph.key: graph for graph in graphs}.values())


def _is_awaited(graph: CompiledGraph) -> bool:
    """Whether it may still become ready in this run."""
    return graph.is_pending and not graph.is_missed


def _captured(each: Sequence[Replays | None]) -> dict[str, Any]:
    """The captured calls of a root module and its copies, which share their memory."""
    replays = [one for one in each if one is not None]
    return {
        "signatures": sum(one.captured for one in replays),
        "captures": sum(one.captures for one in replays),
        "replayed": sum(one.replayed for one in replays),
        "vram_bytes": max((one.vram_bytes for one in replays), default=0),
        "not_replayed": _together(one.reasons for one in replays),
    }


def _pieces(each: Sequence[Pieces | None]) -> dict[str, Any]:
    """The places of a root module and its copies that are captured one by one."""
    found = [one for one in each if one is not None]
    return {
        "places": sum(one.captured for one in found),
        "replayed": sum(one.replayed for one in found),
        "vram_bytes": max((one.vram_bytes for one in found), default=0),
        "cuts": _together(one.cuts for one in found),
        "refused": _together(one.refused for one in found),
    }


def _together(counters: Iterable[Counter[Reason]]) -> dict[Reason, int]:
    total: Counter[Reason] = Counter()
    for counter in counters:
        total.update(dict(counter))  # the prompt's thread counts on
    return dict(total)


def _state(graph: CompiledGraph) -> str:
    return (State.MISSING if graph.is_missed else graph.state).value


def _kind(kind: Any) -> dict[str, Any]:
    graph = kind.graph
    known = graph is not None
    loaded = graph.loaded if known else None
    return {
        "kind": kind.label,
        "places": len(kind.here),
        "state": _state(graph) if known else "eager",
        "variants": {name: graph.state.value for name, graph in kind.further.items()},
        **told(graph.reason if known else kind.reason),
        "layers": [
            {"what": what, "why": why, "count": count}
            for (what, why), count in sorted(in_words(kind.left).items())
        ],
        "key": graph.key if known else None,
        **{
            name: getattr(loaded, name, None)
            for name in ("source", "build_seconds", "load_ms", "bytes")
        },
    }


def _left(kinds: Sequence[Kind]) -> Counter[tuple[str, Reason]]:
    """Count the layers within compiled blocks that the host runs, by sort and reason."""
    layers: Counter[tuple[str, Reason]] = Counter()
    for kind in kinds:
        layers.update(in_words(kind.left))
    return layers


def _by_reason(eager: list[tuple[str, Reason]]) -> list[dict[str, Any]]:
    places: dict[Reason, list[str]] = defaultdict(list)
    for place, reason in eager:
        places[reason].append(place)
    return [
        {**told(reason), "places": len(names), "examples": names[:_EXAMPLES]}
        for reason, names in sorted(places.items(), key=lambda item: -len(item[1]))
    ]


_NOTHING_CAPTURED = {**_captured(()), "pieces": _pieces(())}
_NOTHING_BUILT = BuildProgress(0, 0, [], None, 0, False)._asdict()
_OF_NO_NODE: dict[str, Any] = {"nodes": [], "by": "node"}
_EMPTY: dict[str, Any] = {
    "building": _NOTHING_BUILT,
    "to_install": [],
    "id": "",
    "model": "",
    **_OF_NO_NODE,
    "backend": "eager",
    "when_missing": "",
    "graphs": "",
    "regions": {"total": 0, "compiled": 0, "eager": 0},
    "ready": 0,
    "idle": 0,
    "unused": False,
    "eager": [],
    "kinds": [],
    "cards": [],
    "builds": 0,
    "loads": 0,
    "reused": 0,
    "calls": {"compiled": 0, "eager": 0},
    "captured": _NOTHING_CAPTURED,
    "learned": False,
    "standing": "eager",
    "stage": Stage.NORMAL.value,
    **gain_told(None),
    "speed": None,
    "misses": [],
    "disk_bytes": 0,
    "vram_bytes": 0,
    "seconds_saved": 0.0,
}
