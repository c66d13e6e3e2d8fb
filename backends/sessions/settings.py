"""Own the settings: a typed table, kept as JSON in the host's system user directory."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import shown

logger = logging.getLogger(__name__)

FILE_NAME = "settings.json"
GIB = 1024**3


@dataclass(frozen=True)
class Setting:
    """One number that a user may change: its default, its range and its unit."""

    name: str
    default: float
    minimum: float
    maximum: float
    unit: str
    whole: bool = True

    def validate_value(self, value: object) -> float:
        """Return `value` as this setting's number.

        Raises:
            ValueError: it is no number, not whole where it must be, or out of range.
        """
        wanted = (
            f"{self.name} must be a {'whole ' if self.whole else ''}number "
            f"from {self.minimum:g} to {self.maximum:g} ({self.unit}), got {shown(value)}"
        )
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(wanted)
        if not self.minimum <= value <= self.maximum:  # false for NaN as well
            raise ValueError(wanted)
        if self.whole:
            if value != int(value):
                raise ValueError(wanted)
            return int(value)
        return float(value)


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("workers", 0, 0, 64, "processes, 0 = automatic"),
        Setting("store_cap_gib", 4.0, 0.1, 1024, "GiB", whole=False),
        Setting("job_limit_s", 600, 30, 86400, "seconds"),
        Setting("idle_s", 30, 1, 3600, "seconds"),
        Setting("runs_before_special", 3, 0, 1000, "runs of one size, 0 = only where asked for"),
        Setting("captured_vram_percent", 10, 0, 90, "percent of the card, 0 = no CUDA graphs"),
        Setting("captured_limit_s", 0.5, 0.01, 3600, "seconds of one call", whole=False),
        Setting("keep_captured", 1, 0, 1, "1 = kept between prompts, 0 = given back after each"),
    )
}


def validate_settings(changes: object) -> dict[str, float]:
    """Check a mapping of setting names to numbers, all of it before any of it is used.

    Raises:
        ValueError: not a mapping, an unknown name, or a value that its setting refuses.
    """
    if not isinstance(changes, Mapping):
        raise ValueError(f"settings must be a JSON object, got {type(changes).__name__}")
    checked = {}
    for name, value in changes.items():
        if name not in SETTINGS:
            raise ValueError(f"setting must be one of {', '.join(SETTINGS)}, got {shown(name)}")
        checked[name] = SETTINGS[name].validate_value(value)
    return checked


class Settings:
    """The settings in force; safe to read and change from any thread.

    A file that cannot be read, or a value in it that is out of range, costs a warning and leaves
    the defaults in force; it is not overwritten until a setting is changed.
    """

    def __init__(self, directory: Path) -> None:
        self.path = Path(directory) / FILE_NAME
        self._lock = threading.Lock()
        self._changed = self._read()

    @property
    def workers(self) -> int:
        """Builder processes; 0 lets the machine's size decide."""
        return int(self._value("workers"))

    @property
    def store_cap_bytes(self) -> int:
        """Size of the shared store above which the least recently used graphs go."""
        return int(self._value("store_cap_gib") * GIB)

    @property
    def job_limit_s(self) -> float:
        """Seconds after which one build is given up."""
        return self._value("job_limit_s")

    @property
    def idle_s(self) -> float:
        """Seconds after which a builder process with nothing to do ends."""
        return self._value("idle_s")

    @property
    def runs_before_special(self) -> int:
        """Runs of one size before it gets graphs of its own; 0: it gets none by itself."""
        return int(self._value("runs_before_special"))

    @property
    def captured_vram_share(self) -> float:
        """Share of the card's memory that captured CUDA graphs may take, 0 to 1."""
        return self._value("captured_vram_percent") / 100

    @property
    def captured_limit_s(self) -> float:
        """Seconds on the GPU beyond which a call is not captured: what the processor takes to start
        its kernels is no longer waited for.
        """
        return self._value("captured_limit_s")

    @property
    def keeps_captured(self) -> bool:
        """Whether captured CUDA graphs outlive the run that they were captured in."""
        return bool(self._value("keep_captured"))

    def as_dict(self) -> dict[str, float]:
        """Return every setting's value in force."""
        return {name: self._value(name) for name in SETTINGS}

    def update(self, changes: object) -> dict[str, float]:
        """Change settings, all or none, and keep them; values of another server are kept too.

        Raises:
            ValueError: see `validate_settings`.
            OSError: the file cannot be written; the change is in force until the server ends.
        """
        checked = validate_settings(changes)
        with self._lock:
            self._changed = {**self._changed, **self._read(), **checked}
            self._write(self._changed)
        return self.as_dict()

    def _value(self, name: str) -> float:
        return self._changed.get(name, SETTINGS[name].default)

    def _read(self) -> dict[str, float]:
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("Settings in %s cannot be read, defaults are used: %s", self.path, error)
            return {}
        values: dict[str, float] = {}
        for name, value in _items(stored):
            try:
                values.update(validate_settings({name: value}))
            except ValueError as error:
                logger.warning("Setting in %s is ignored: %s", self.path, error)
        return values

    def _write(self, values: Mapping[str, float]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".settings-", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(values, file, indent=2, sort_keys=True)
            os.replace(temporary, self.path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


def _items(stored: Any) -> list[tuple[str, Any]]:
    """Return the pairs of a settings file; one that is no JSON object counts as one bad pair."""
    return list(stored.items()) if isinstance(stored, dict) else [("settings", stored)]
