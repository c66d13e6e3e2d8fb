"""`prebuild` compiles what saved workflows and checkpoints need before anybody is served: while an
image is built, or in CI. It runs a ComfyUI server of its own, and of each workflow the part that
leads to the nodes which compile.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from urllib.error import HTTPError

from warmgraph_backends.device.cards import CARDS

from .output import say, say_lines
from .own_server import HostError, OwnServer, failure
from .wanted import Part, Wanted, WantedError, checkpoint, part_of, read

STORE = "compiled_graphs"
_PRETENDED_HOST = Path(__file__).with_name("pretended_host.py")
_POLL_S = 0.5
_LIMIT_S = 7 * 24 * 3600.0  # builds have limits of their own
_KEY_DIGITS = 12

Result = dict[str, Any]
_NOTHING: Result = {"store": None, "kept": True, "warnings": [], "builds": 0, "loads": 0}


class Places(NamedTuple):
    """The server's folders; None is ComfyUI's default.

    Attributes:
        comfyui: the folder with ComfyUI's main.py.
        base: its base folder.
        user: its user folder, with the signing key.
        store: compiled graphs are read from there and kept there.
        log: for ComfyUI's output; None: not kept.
    """

    comfyui: Path
    base: Path | None = None
    user: Path | None = None
    store: Path | None = None
    log: Path | None = None


class Wish(NamedTuple):
    """What is to be compiled.

    Attributes:
        workflows: files.
        checkpoints: names, as ComfyUI lists them.
        vaes: whether the checkpoints' VAEs are wanted, too.
        target: of a card that need not be here; None: this machine's.
    """

    workflows: Sequence[Path]
    checkpoints: Sequence[str] = ()
    vaes: bool = False
    target: str | None = None


def prebuild(
    wish: Wish,
    places: Places,
    flags: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    json_file: Path | None = None,
) -> int:
    """Compile what is missing, and print what was loaded, what was built, and what failed and why.

    Args:
        flags: of ComfyUI, as for the server that will serve.
        environment: variables of the server, added to this process's.
        json_file: for all results, for machines.

    Returns:
        0 if every part that should be compiled is, and is kept; else 1.
    """
    started = time.monotonic()
    results = [_read(path) for path in wish.workflows]
    results += [checkpoint(name, vae=wish.vaes) for name in wish.checkpoints]
    whole: Result = {"ok": False, "error": None, "target": wish.target, **_NOTHING}
    with tempfile.TemporaryDirectory(prefix="warmgraph-prebuild-") as folder, _ending_softly():
        server = _server(wish.target, places, flags, environment or {}, Path(folder))
        if any(isinstance(each, Wanted) for each in results):
            try:
                say(f"starting ComfyUI in {places.comfyui}{_as_on(wish.target)}")
                with server:
                    results = [_result(each, server) for each in results]
                    whole.update(_kept(server.report()))
            except HostError as error:
                whole["error"] = str(error)
    done = [each if isinstance(each, dict) else _failed(each.name, "") for each in results]
    whole["workflows"] = done
    whole["seconds"] = round(time.monotonic() - started, 1)
    whole.update(_counts(done))
    whole["ok"] = whole["error"] is None and whole["kept"] and all(each["ok"] for each in done)
    _say_end(whole)
    if json_file is not None:
        json_file.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return 0 if whole["ok"] else 1


def _read(path: Path) -> Wanted | Result:
    try:
        return read(path)
    except WantedError as error:
        result = _failed(str(path), str(error))
        _say_result(result)
        return result


def _failed(name: str, why: str) -> Result:
    return {"name": name, "ok": False, "error": why, "seconds": 0.0, "models": []}


def _as_on(target: str | None) -> str:
    if target is None:
        return ""
    card = CARDS[target]
    return f", as on an {card.name} ({target}, {card.memory >> 30} GiB)"


def _server(
    target: str | None,
    places: Places,
    flags: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
) -> OwnServer:
    """The server that builds; `folder` is removed after it."""
    ours: list[str] = []
    for flag, path in (("--base-directory", places.base), ("--user-directory", places.user)):
        ours += [] if path is None else [flag, str(path.resolve())]
    if places.store is not None:
        paths = folder / "paths.yaml"  # JSON is YAML, too
        store = {STORE: str(places.store.resolve()), "is_default": True}
        paths.write_text(json.dumps({"warmgraph": store}), encoding="utf-8")
        ours += ["--extra-model-paths-config", str(paths)]
    log = places.log or folder / "comfyui.log"
    before = [] if target is None else [str(_PRETENDED_HOST), target]
    if target is not None:  # a card in this machine is not used
        environment = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    flags = [*ours, *flags]
    return OwnServer(places.comfyui, log, before=before, flags=flags, environment=environment)


@contextmanager
def _ending_softly() -> Iterator[None]:
    """End the server, too, when this process is asked to end, as Docker does."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- one workflow -------------------------------------------------------------------------------


def _result(wanted: Wanted | Result, server: OwnServer) -> Result:
    """Compile what one workflow needs."""
    if isinstance(wanted, dict):
        return wanted
    started = time.monotonic()
    try:
        _check_pack(server)
        part = part_of(wanted, server.object_info())
        entry = server.wait(
            server.submit(part.prompt), _LIMIT_S, poll_s=_POLL_S, meanwhile=_progress(server)
        )
        if (why := failure(entry)) is not None:
            raise WantedError(why)
        models = _models(part, entry["outputs"], _settled(server))
        result = {
            "name": wanted.name,
            "ok": all(model["ok"] for model in models),
            "error": None,
            "models": models,
        }
    except WantedError as error:
        result = _failed(wanted.name, str(error))
    result["seconds"] = round(time.monotonic() - started, 1)
    _say_result(result)
    return result


def _check_pack(server: OwnServer) -> None:
    try:
        server.report()
    except HTTPError as error:
        if error.code != 404:
            raise
        raise HostError(
            f"ComfyUI in {server.tree} has no Warmgraph; look for IMPORT FAILED in its log:\n"
            f"{server.log[-3000:]}"
        ) from None


def _progress(server: OwnServer) -> Callable[[], None]:
    """Return a function that prints the progress of builds when it changes."""
    told: list[tuple[int, int]] = []

    def say_progress() -> None:
        building = server.report()["building"]
        now = (building["done"], building["total"])
        if now[0] < now[1] and told[-1:] != [now]:
            told.append(now)
            say(f"  compiling: {now[0]} of {now[1]} done")

    return say_progress


def _settled(server: OwnServer) -> Result:
    """The report once nothing is pending: rare parts are built after those a node waits for."""
    progress = _progress(server)
    while (report := server.report())["awaited"]:
        progress()
        time.sleep(_POLL_S)
    return report


def _models(part: Part, outputs: Mapping[str, Any], report: Result) -> list[Result]:
    """The outcome of each node that compiles."""
    by_id = {each["id"]: each for each in report["models"]}
    models = []
    for shown, node in part.reports.items():
        told = outputs[shown]["warmgraph"][0]
        model = by_id.get(told["id"])
        idle = node in part.idle
        parts = [] if model is None else _parts(model)
        bad = [each for each in parts if each["state"] not in ("loaded", "built")]
        models.append(
            {
                "node": node,
                "model": "" if model is None else model["model"],
                "ok": idle or (bool(parts) and not bad),
                "compiles": not idle,
                "parts": parts,
                "text": told["text"] if model is None else model["text"],
            }
        )
    return models


def _parts(model: Mapping[str, Any]) -> list[Result]:
    """Each part of a model: how it was compiled, or why not."""
    parts = [
        {
            "part": kind["kind"],
            "state": kind["source"] if kind["state"] == "ready" else kind["state"],
            "key": kind["key"],
            "seconds": kind["build_seconds"] if kind["source"] == "built" else None,
            "reason": kind["reason"],
        }
        for kind in model["kinds"]
    ]
    told = {each["part"] for each in parts if each["state"] not in ("loaded", "built")}
    for miss in model["misses"]:
        if miss["kind"] not in told:  # rare ones, which do not belong to a place
            part = {"part": miss["kind"], "state": "missing", "key": None, "seconds": None}
            parts.append({**part, "reason": miss["reason"]})
    return parts


# --- in the end ---------------------------------------------------------------------------------


def _kept(report: Mapping[str, Any]) -> Result:
    """Where compiled graphs are, and what a user can fix."""
    warnings = report["warnings"]
    return {
        "store": report["store"]["folder"],
        "kept": not any(each["id"] == "store" for each in warnings),
        "warnings": [f"{each['title']}: {each['text']} {each['command']}" for each in warnings],
        "builds": report["builds"],
        "loads": report["loads"],
    }


def _counts(results: Sequence[Result]) -> Result:
    failed = {
        (part["part"], part["key"])
        for result in results
        for model in result["models"]
        for part in model["parts"]
        if part["state"] not in ("loaded", "built")
    }
    return {"failed": len(failed)}


def _say_result(result: Result) -> None:
    """A workflow's line, and one for each of its parts."""
    if result["error"] is not None:
        say_lines(f"{result['name']}: FAILED: {result['error'].splitlines()[0]}")
        return
    say(f"{result['name']}: {'ready' if result['ok'] else 'FAILED'}, {result['seconds']} s")
    for model in result["models"]:
        name = model["model"] or "nothing"
        if not model["compiles"]:
            say(f"  node {model['node']}: {name} is set to compile nothing")
        elif not model["parts"]:
            say_lines("\n".join(f"  node {model['node']}: {t}" for t in model["text"].splitlines()))
        else:
            say(f"  node {model['node']}: {name}")
        for part in model["parts"]:
            key = (part["key"] or "")[:_KEY_DIGITS].ljust(_KEY_DIGITS)
            seconds = "" if part["seconds"] is None else f", {part['seconds']:.1f} s"
            why = f": {part['reason']}" if part["reason"] else ""
            say(f"    {part['state']:8} {key} {part['part']}{seconds}{why}")


def _say_end(whole: Result) -> None:
    if whole["error"] is not None:
        say_lines(whole["error"])
    for warning in whole["warnings"]:
        say_lines(warning)
    done = whole["workflows"]
    ready = sum(each["ok"] for each in done)
    say(
        f"{ready} of {len(done)} ready: {whole['loads']} parts loaded, {whole['builds']} built, "
        f"{whole['failed']} failed, in {whole['seconds']} s"
    )
    if whole["store"] is not None:
        say(f"compiled graphs are in {whole['store']}")
