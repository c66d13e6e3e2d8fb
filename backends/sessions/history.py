"""The last sampler runs of this machine, one line of JSON each, in the pack's private folder."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..runtime.pace import COMPILED, EAGER, EXACT
from ..runtime.session import Session
from ..storing.files import write_whole

logger = logging.getLogger(__name__)

FILE_NAME = "runs.jsonl"
#: Runs that are told, and those that are kept for what a day saved; the file holds up to twice as
#: many lines before it is written anew.
TOLD, KEPT = 100, 1500
_MAX_BYTES = 2 << 20
_MAX_TEXT = 200
_FORMS = (EAGER, EXACT, COMPILED)
#: What two runs have in common that make the same image.
_IMAGE = ("model", "size", "batch")


class History:
    """Notes and reports runs; if the disk cannot be written, those of this process are lost."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """Set up; nothing is read yet.

        Args:
            directory: the pack's private folder.
            clock: returns Unix seconds.
        """
        self._path = directory / FILE_NAME
        self._clock = clock
        self._lock = threading.Lock()
        self._lines = 0
        self._runs: deque[dict[str, Any]] | None = None
        #: Changes with each run.
        self.version = 0

    def runs(self) -> list[dict[str, Any]]:
        """Return the last runs as JSON-plain data, `TOLD` at most, the newest last.

        Each has: at (Unix seconds), model, size (of the image), batch, steps, form (eager, exact or
        compiled), ms (of a step, None where unknown), noise (of that, in ms), busy (whether
        something ran beside it), eager_ms (as ms), builds (graphs that were built for it since the
        run before), misses (graphs that it had to do without), prompt (its id, None where unknown).
        """
        with self._lock:
            return list(self._kept())[-TOLD:]

    def saved_today(self) -> dict[str, Any]:
        """Return the seconds that this day's runs saved, and the number of runs, as JSON-plain
        data; only runs that were measured both ways count.
        """
        today = _day(self._clock())
        with self._lock:
            pairs = [run for run in self._kept() if _is_pair(run) and _day(run["at"]) == today]
        saved = sum(run["steps"] * (run["eager_ms"] - run["ms"]) for run in pairs) / 1000
        return {"seconds": round(saved, 1), "runs": len(pairs)}

    def compared(self, first: str, second: str) -> list[dict[str, Any]]:
        """Return the runs of a prompt, each with the run of another prompt that made the same image
        without us under `plain`, None without one, as JSON-plain data.

        Args:
            first, second: the prompts' ids.
        """
        with self._lock:
            kept = list(self._kept())
        mine, others = ([run for run in kept if run["prompt"] == each] for each in (first, second))
        pairs = []
        for run in mine:
            like = [each for each in others if all(each[name] == run[name] for name in _IMAGE)]
            others = [each for each in others if each is not next(iter(like), None)]
            pairs.append({**run, "plain": next(iter(like), None)})
        return pairs

    def note(self, session: Session, prompt: str | None = None) -> bool:
        """Note the run of a session that has just ended, if it was a sampler's; returns whether it
        was.

        Args:
            prompt: the id of the running one.
        """
        run = session.pace.take_run()
        if run is None:
            return False
        builds, misses = session.take_counts()
        entry = {
            "at": round(self._clock(), 3),
            "model": session.name,
            "size": run.size,
            "batch": run.batch,
            "steps": run.steps,
            "form": run.form,
            "ms": _rounded(run.ms),
            "noise": _rounded(run.noise),
            "busy": run.busy,
            "eager_ms": _rounded(run.eager_ms),
            "builds": builds,
            "misses": misses,
            "prompt": prompt,
        }
        with self._lock:
            self._kept().append(entry)
            self._write(entry)
            self.version += 1
        return True

    def _kept(self) -> deque[dict[str, Any]]:
        """The runs, read from the file at first use."""
        if self._runs is None:
            self._runs = deque(self._read(), maxlen=KEPT)
        return self._runs

    def _read(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_BYTES).decode("utf-8", "replace")
        except OSError:
            return
        for line in text.splitlines():
            self._lines += 1
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):  # half a line of a server that was killed
                continue
            if _is_run(entry):
                yield entry

    def _write(self, entry: dict[str, Any]) -> None:
        """Append a line; now and then rewrite the file without the oldest."""
        try:
            if self._lines >= 2 * KEPT:
                lines = [json.dumps(each, allow_nan=False) for each in self._kept()]
                write_whole(self._path, ("\n".join(lines) + "\n").encode())
                self._lines = len(lines)
                return
            with self._path.open("ab") as file:
                file.write((json.dumps(entry, allow_nan=False) + "\n").encode())
            self._lines += 1
        except OSError as error:
            logger.debug("A run was not written down: %s", error)


def _is_run(entry: Any) -> bool:
    """Whether a line of the file is a valid run."""
    if not isinstance(entry, dict):
        return False
    texts = [entry.get("model"), entry.get("size"), entry.get("prompt") or ""]
    counts = [entry.get(name) for name in ("batch", "steps", "builds", "misses")]
    times = [entry.get(name, "") for name in ("ms", "noise", "eager_ms")]
    return (
        len(entry) == 13
        and all(isinstance(text, str) and len(text) <= _MAX_TEXT for text in texts)
        and all(type(count) is int and count >= 0 for count in counts)
        and all(_is_time(time) for time in times)
        and _is_time(entry.get("at", ""))
        and entry["at"] is not None
        and entry.get("form") in _FORMS
        and type(entry.get("busy")) is bool
    )


def _is_pair(run: dict[str, Any]) -> bool:
    """Whether a run's steps were ours and undisturbed, and the time of the host's own is known."""
    times = run["ms"], run["eager_ms"]
    return run["form"] != EAGER and not run["busy"] and None not in times


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 6)


def _day(seconds: float) -> tuple[int, int]:
    """The day of a time on this machine."""
    local = time.localtime(seconds)
    return local.tm_year, local.tm_yday


def _is_time(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value) and value >= 0)
