"""Own the settings: one table of what they are and mean, kept as JSON in the host's system user
directory.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import shown
from ..storing.files import patiently, write_whole
from .lines import RefusedError

logger = logging.getLogger(__name__)

FILE_NAME = "settings.json"
GIB = 1024**3


@dataclass(frozen=True)
class Setting:
    """What a user may change: a number, or a toggle. The page makes its controls from it.

    Attributes:
        place: its name in the page's settings, "Word.Name"; values are kept by it, so it stays.
        group: under which the page shows it.
        title: what the page calls it.
        help: what a user gains and loses.
        unit: of the number, and what its special values mean.
        control: what the page shows it as.
        step: of the control; numbers between are taken, too, unless it must be whole.
    """

    name: str
    place: str
    title: str
    help: str
    default: float
    minimum: float = 0
    maximum: float = 1
    unit: str = ""
    whole: bool = True
    control: Literal["number", "slider", "toggle"] = "number"
    step: float = 1
    group: Literal["Speed", "Disk", "Experts"] = "Speed"

    def validate_value(self, value: object) -> float:
        """Return `value` as this setting's number; a toggle's is a bool.

        Raises:
            RefusedError: it is no number, not whole where it must be, or out of range.
        """
        if self.control == "toggle":
            if not isinstance(value, (bool, int)) or value not in (0, 1):
                raise RefusedError("refused_toggle", name=self.name, got=shown(value))
            return bool(value)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not self.minimum <= value <= self.maximum  # false for NaN as well
            or (self.whole and value != int(value))
        ):
            raise RefusedError(
                "refused_whole" if self.whole else "refused_number",
                name=self.name,
                minimum=f"{self.minimum:g}",
                maximum=f"{self.maximum:g}",
                got=shown(value),
            )
        return int(value) if self.whole else float(value)


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            name="compile_all",
            place="Speed.CompileAll",
            title="Compile every model that reaches a sampler",
            help="On: each model is compiled as by a Compile Model before its sampler, in all "
            "workflows, apps and prompts by API; none of them is changed. A bypassed Compile Model "
            "means: not this one. Models that another pack compiles are left to it.",
            default=False,
            control="toggle",
        ),
        Setting(
            name="compile_all_vaes",
            place="Speed.CompileAllVaes",
            title="And their VAEs",
            help="On: with the setting above, each VAE that decodes or encodes images is "
            "compiled, too, as by a Compile VAE.",
            default=False,
            control="toggle",
        ),
        Setting(
            name="make_faster_all",
            place="Speed.MakeFasterAll",
            title="Make this workflow faster: VAEs and ControlNets, too",
            help="On: the command puts Compile VAE and Compile ControlNet where they belong, too. "
            "Off: Compile Model alone; another command takes all of them.",
            default=False,
            control="toggle",
        ),
        Setting(
            name="learn_models",
            place="Speed.LearnModels",
            title="Learn models that Warmgraph does not know",
            help="On: a model that is new to Warmgraph runs one step at normal speed, in which "
            "Warmgraph watches how its parts are called. Then they are compiled like those of any "
            "other model. Each is compared with ComfyUI's own result first, and so is a whole "
            "step. It takes effect when Compile Model runs the next time.",
            default=True,
            control="toggle",
        ),
        Setting(
            name="workers",
            place="Builder.Workers",
            title="Processes that compile",
            help="How many processes compile at the same time. With more, a model is faster "
            "sooner, and images made meanwhile have fewer cores and less memory. 0 lets the "
            "machine's cores, RAM and VRAM decide.",
            default=0,
            maximum=64,
            unit="0 = automatic",
        ),
        Setting(
            name="job_limit_s",
            place="Builder.JobLimit",
            title="Time limit for one compiled graph",
            help="A part that takes longer to compile is given up, and runs at normal speed. Raise "
            "it on a slow machine.",
            group="Experts",
            default=600,
            minimum=30,
            maximum=86400,
            unit="seconds",
            step=30,
        ),
        Setting(
            name="idle_s",
            place="Builder.Idle",
            title="Processes that compile end when idle for",
            help="Idle processes end after this time and free their memory. The next compile then "
            "waits a few seconds for a new one.",
            group="Experts",
            default=30,
            minimum=1,
            maximum=3600,
            unit="seconds",
        ),
        Setting(
            name="store_cap_gib",
            place="Store.Cap",
            title="Size limit of compiled graphs",
            help="Above it, those not used for longest are deleted, and compiled again when they "
            "are needed. Copies beside a saved workflow are never deleted.",
            group="Disk",
            default=4.0,
            minimum=0.1,
            maximum=1024,
            unit="GiB",
            whole=False,
            step=0.5,
        ),
        Setting(
            name="captured_vram_percent",
            place="Captured.Vram",
            title="VRAM for recorded steps",
            help="Repeated steps are recorded and replayed, which takes this much memory at most; "
            "ComfyUI gets it back when it needs room. 0: no step is recorded, and each one waits "
            "for the processor.",
            group="Disk",
            default=10,
            maximum=90,
            unit="percent of the card, 0 = none",
            control="slider",
        ),
        Setting(
            name="captured_limit_s",
            place="Captured.Limit",
            title="Longest step that is recorded",
            group="Experts",
            help="A step that takes longer does not wait for the processor, so replaying it would "
            "only take memory.",
            default=0.5,
            minimum=0.01,
            maximum=3600,
            unit="seconds of one call",
            whole=False,
            step=0.1,
        ),
        Setting(
            name="keep_captured",
            place="Captured.Keep",
            title="Keep recorded steps between prompts",
            help="Off frees their memory when a prompt has sampled; each prompt then records its "
            "steps again, which takes up to a third of a second.",
            group="Disk",
            default=True,
            control="toggle",
        ),
        Setting(
            name="metrics",
            place="Server.Metrics",
            title="Figures for Prometheus",
            group="Experts",
            help="On: GET /warmgraph/metrics answers with builds, speed, disk and VRAM in "
            "Prometheus' text format, to whoever reaches this server. It needs the Python package "
            "prometheus_client.",
            default=False,
            control="toggle",
        ),
    )
}


def validate_settings(changes: object) -> dict[str, float]:
    """Check a mapping of setting names to numbers, all of it before any of it is used.

    Raises:
        RefusedError: not a mapping, an unknown name, or a value that its setting refuses.
    """
    if not isinstance(changes, Mapping):
        raise RefusedError("refused_settings", got=type(changes).__name__)
    checked = {}
    for name, value in changes.items():
        if name not in SETTINGS:
            choices = ", ".join(SETTINGS)
            raise RefusedError("refused_choice", name="setting", choices=choices, got=shown(name))
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
        """Size of the shared store above which the least recently used graphs are deleted."""
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
    def captured_vram_share(self) -> float:
        """Share of the card's memory that captured CUDA graphs may take, 0 to 1."""
        return self._value("captured_vram_percent") / 100

    @property
    def captured_limit_s(self) -> float:
        """Seconds on the GPU beyond which a call is not captured: it no longer waits for the
        processor to start its kernels.
        """
        return self._value("captured_limit_s")

    @property
    def offers_metrics(self) -> bool:
        """Whether the server answers with figures for a monitoring system."""
        return bool(self._value("metrics"))

    @property
    def compiles_all(self) -> bool:
        """Whether every model that reaches a sampler is compiled, without a node."""
        return bool(self._value("compile_all"))

    @property
    def compiles_all_vaes(self) -> bool:
        """Whether the VAEs of those prompts are, too."""
        return bool(self._value("compile_all_vaes"))

    @property
    def learns_models(self) -> bool:
        """Whether models that no family describes are learned from a step of theirs."""
        return bool(self._value("learn_models"))

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
            RefusedError: see `validate_settings`.
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
            stored = json.loads(patiently(lambda: self.path.read_text(encoding="utf-8")))
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
        write_whole(self.path, json.dumps(values, indent=2, sort_keys=True).encode())


def _items(stored: Any) -> list[tuple[str, Any]]:
    """Return the pairs of a settings file; one that is not a JSON object counts as one bad pair."""
    return list(stored.items()) if isinstance(stored, dict) else [("settings", stored)]
