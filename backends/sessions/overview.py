"""All that a server process knows, as plain data, and what a user may do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..attaching.caches import Caches
from ..building.builder import Builder
from ..cuda_graphs.memory import CapturedMemory
from ..device.gpu import current
from ..events import Event, Events
from ..fleet.fleet import Fleet
from ..graphs.library import Graphs
from ..host_api.memory import empty_cache
from ..host_api.needs import Feature
from ..live import Live
from ..reasons import Reason
from ..runtime.session import Session
from ..storing.store import Store, StoreUsage
from . import warnings
from .cache_reports import deepcache_report, stepcache_report
from .comparison import comparison
from .history import History
from .inventory import Inventory, What
from .lines import Line
from .prompts import Prompts, cancelled
from .report import model_report
from .settings import Settings


class Overview:
    """Reads everything from any thread, and passes on a user's requests."""

    def __init__(
        self,
        *,
        sessions: Live[Session],
        caches: Caches,
        builder: Builder,
        graphs: Graphs,
        store: Store,
        fleet: Fleet,
        captured: CapturedMemory,
        prompts: Prompts,
        history: History,
        settings: Settings,
        events: Events,
        off: Mapping[Feature, Reason],
    ) -> None:
        """Set up with what the engine owns.

        Args:
            sessions: the sessions.
            caches: what MODELs carry besides sessions.
            builder: builds graphs.
            graphs: all graphs of the process.
            store: the graph files of this machine.
            fleet: what this machine shares with others.
            captured: the memory of captured calls.
            prompts: the state of the server's prompts.
            history: the last sampler runs.
            settings: the settings in force.
            events: listeners by event.
            off: features that are off with this host, and what it lacks for them.
        """
        self._sessions = sessions
        self._caches = caches
        self._builder = builder
        self._graphs = graphs
        self._store = store
        self._fleet = fleet
        self._captured = captured
        self._prompts = prompts
        self._history = history
        self._settings = settings
        self._events = events
        self._off = off
        self._inventory = Inventory(store, graphs.ready_keys)

    def snapshot(self) -> dict[str, Any]:
        """Return all reports, the builder's progress, the store's use and the settings.

        Reports of caches are separate: a model's report here covers only its graphs.
        """
        usage = self._store.usage()
        deepcaches, stepcaches = self._caches.all()
        return {
            "models": [model_report(s, self._builder, None) for s in self._sessions.values()],
            "deepcaches": [deepcache_report(cache) for cache in deepcaches],
            "stepcaches": [stepcache_report(cache) for cache in stepcaches],
            "builds": self._graphs.builds,
            "loads": self._graphs.loads,
            "runs_made": self._history.version,
            "saved_today": self._history.saved_today(),
            "building": self.building(),
            "awaited": self._graphs.awaited(),
            "store": {
                **usage._asdict(),
                "cap_bytes": self._settings.store_cap_bytes,
                "folder": str(self._store.root),
            },
            "fleet": self._fleet.report(),
            "captured": {
                "vram_bytes": self._captured.used_bytes,
                "budget_bytes": self._budget_bytes(),
                "cards": [
                    {
                        "device": str(device),
                        "vram_bytes": held,
                        "budget_bytes": self._captured.budget_bytes(device),
                    }
                    for device, held in self._captured.by_device.items()
                ],
            },
            "warnings": [
                warning.plain()
                for warning in (
                    *warnings.of_machine(),
                    *warnings.of_settings(self._settings, self._off),
                    *warnings.of_graphs(
                        self._graphs, self._builder.verdict, self._store.trust_command
                    ),
                )
            ],
            "settings": self._settings.as_dict(),
        }

    def details(self) -> dict[str, Any]:
        """Return what takes longer to collect: the store by model family, and the last runs."""
        return {"stored": self._inventory.by_family(), "runs": self._history.runs()}

    def compared(self, first: str, second: str) -> dict[str, Any]:
        """Return what steps of a prompt take beside those of the same without us, as JSON-plain
        data: a sentence for each run of both, and the key of a note where not all can be told.

        Args:
            first, second: the prompts' ids.
        """
        return comparison(self._history.compared(first, second))

    def building(self) -> dict[str, Any]:
        """Return the builder's progress."""
        return self._builder.progress()._asdict()

    def cancelled(self) -> Line:
        """What a node says after its wait was cancelled."""
        return cancelled(self._builder.progress())

    # --- what a user may ask for ------------------------------------------------------------------

    def pause_builds(self, paused: bool) -> None:
        """Pause building, or resume."""
        self._builder.pause(paused)

    def cancel_builds(self) -> int:
        """Drop all builds until a run needs their graphs; returns how many those were."""
        return self._builder.cancel()

    def clear_store(self, what: What) -> StoreUsage:
        """Remove graphs from the shared store; returns how many, and their bytes."""
        removed = self._inventory.clear(what)
        self._events.publish(Event.CLEARED)
        return removed

    def free_captured(self) -> tuple[int, bool]:
        """Free the VRAM of captured steps, once no run goes on.

        Returns:
            How many bytes, and whether it is done; if not, it is done after the run.
        """
        held = self._captured.used_bytes
        return held, self._prompts.when_idle(self._give_back)

    def _give_back(self) -> None:
        for session in self._sessions.values():
            for scope in session.scopes:
                scope.give_back()
        empty_cache()
        self._events.publish(Event.CLEARED)

    def _budget_bytes(self) -> int:
        device = current()
        return 0 if device is None else self._captured.budget_bytes(device)
