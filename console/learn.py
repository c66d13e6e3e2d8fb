"""`learn` shows how a model calls its blocks: what a worker learns of it, in words, as data, as the
skeleton of a family's module, or compared with another version of ComfyUI.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from warmgraph_backends.errors import LearnError

from .learned_words import skeleton, words
from .output import say, say_lines, stop

PACK = Path(__file__).resolve().parents[1]


class Wish(NamedTuple):
    """How to print a record: `as_json`, as a `skeleton`, or in words."""

    as_json: bool = False
    skeleton: bool = False


def learn_one(model: str, comfyui: Path, wish: Wish, text: int | None) -> int:
    """Learn one model, and print what was learned.

    Args:
        model: a checkpoint file, or the name of a small transformer of `tools`.
        comfyui: the folder with ComfyUI's own code.
        wish: how to print it.
        text: width of a text's tokens, for a file of an unknown family.
    """
    path = Path(model)
    try:
        record = _of_file(path, comfyui, text) if path.is_file() else _of_small(model, comfyui)
    except LearnError as error:
        say(f"{model}: nothing is learned: {error}")
        return 1
    except _UnknownError as error:
        return stop(str(error))
    if wish.as_json:
        say(json.dumps(record, sort_keys=True))
    else:
        say_lines(skeleton(record) if wish.skeleton else words(record))
    return 0


def learn_all(comfyui: Path, against: Path | None, *, as_json: bool) -> int:
    """Learn every small transformer that this ComfyUI can make.

    Args:
        comfyui: the folder with ComfyUI's own code.
        against: the output of `--all --json` with another ComfyUI.
        as_json: whether to print all records, for a later comparison.

    Returns:
        1 if anything differs from `against`.
    """
    try:
        before = None if against is None else dict(json.loads(against.read_text("utf-8")))
        with _tools(comfyui) as lessons:
            records = {kind: _learned(lessons, kind) for kind in lessons.kinds()}
    except (OSError, ValueError, _UnknownError) as error:
        return stop(str(error))
    if as_json:
        say(json.dumps(records, sort_keys=True))
        return 0
    if before is None:
        for kind, record in records.items():
            say_lines(f"{kind}: {told(record)}")
        return 0
    lines = changes(before, records)
    for line in lines or ["nothing is learned otherwise"]:
        say_lines(line)
    return 1 if lines else 0


def told(record: dict[str, Any]) -> str:
    """Return a record in words; if nothing was learned, why."""
    return f"nothing is learned: {record['refused']}" if "refused" in record else words(record)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Say what is learned differently, a text for each model.

    Args:
        before: records by name.
        after: those of now.
    """
    found = []
    for kind in sorted(before.keys() | after.keys()):
        if kind not in after:
            found.append(f"{kind}: is not there any more")
        elif kind not in before:
            found.append(f"{kind}: is new: {told(after[kind])}")
        elif before[kind] != after[kind]:
            one, two = (told(each[kind]).splitlines() for each in (before, after))
            lines = [line for line in difflib.ndiff(one, two) if line[0] in "+-"]
            found.append("\n".join([f"{kind}:", *(f"    {line}" for line in lines)]))
    return found


class _UnknownError(Exception):
    """There is no such model; the text lists those there are."""


def _learned(lessons: Any, kind: str) -> dict[str, Any]:
    try:
        return _record(lessons.lesson(kind))
    except LearnError as error:
        return {"refused": str(error)}


def _record(task: dict[str, Any]) -> dict[str, Any]:
    """Return a model's record, as a worker learns it."""
    from warmgraph_backends.worker.learn import run

    data, _ = run(task, measure=contextlib.nullcontext)
    return dict(json.loads(data))


def _of_file(path: Path, comfyui: Path, text: int | None) -> dict[str, Any]:
    """The record of a file's model: by its settings, without its weights."""
    from safetensors import SafetensorError

    from warmgraph_backends.families.catalogue import empty_inputs
    from warmgraph_backends.host_api.detected import detected_file
    from warmgraph_backends.host_api.process import import_host
    from warmgraph_backends.learning.unwatched import lesson

    if "comfy.ops" not in sys.modules:
        import_host(["main.py", "--cpu"], str(comfyui))
    try:
        found = detected_file(str(path))
    except (OSError, SafetensorError) as error:
        raise _UnknownError(f"{path}: MODEL must be a safetensors file: {error}") from error
    if found is None:
        raise _UnknownError(f"{path}: ComfyUI knows no model of this kind")
    return _record(lesson(*found, empty_inputs, text))


def _of_small(kind: str, comfyui: Path) -> dict[str, Any]:
    with _tools(comfyui) as lessons:
        if kind not in lessons.kinds():
            names = ", ".join(lessons.kinds())
            raise _UnknownError(f"MODEL must be a checkpoint file or one of {names}, got {kind}")
        return _record(lessons.lesson(kind))


class _Lessons:
    """Small transformers of `tools`, in the ComfyUI of this process."""

    def __init__(self, host: Any, watched: ModuleType) -> None:
        self._host, self._watched = host, watched

    def kinds(self) -> list[str]:
        return list(self._watched.kinds())

    def lesson(self, kind: str) -> dict[str, Any]:
        return dict(self._watched.lesson(self._host, kind))


@contextlib.contextmanager
def _tools(comfyui: Path) -> Iterator[_Lessons]:
    """Boot ComfyUI as tests do."""
    folder = PACK / "dev" / "tools"
    if not folder.is_dir():
        raise _UnknownError("small models are made by the folder dev/tools/ of the project itself")
    if "warmgraph_tools" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "warmgraph_tools", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules["warmgraph_tools"] = package
        spec.loader.exec_module(package)
    inprocess = importlib.import_module("warmgraph_tools.inprocess")
    with inprocess.booted(comfyui) as host:
        yield _Lessons(host, importlib.import_module("warmgraph_tools.watched"))
