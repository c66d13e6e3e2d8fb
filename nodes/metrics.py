"""A server's metrics for Prometheus, if its client library is installed.

https://prometheus.github.io/client_python/
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

LIBRARY = "prometheus_client"


def is_installed() -> bool:
    """Tell whether the client library is there; it is not imported."""
    return importlib.util.find_spec(LIBRARY) is not None


def render(snapshot: dict[str, Any]) -> tuple[bytes, str]:
    """Put the engine's snapshot into Prometheus' text format; also returns the content type.

    Raises:
        ImportError: the client library is not installed.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(snapshot))  # type: ignore[arg-type]  # a collector by its method
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector:
    """One snapshot as metrics; names end in their units."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; called by `registry`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        snapshot = self._snapshot
        building, store, captured = (snapshot[name] for name in ("building", "store", "captured"))
        for name, words, value in (
            ("warmgraph_builds", "Graphs that this server built", snapshot["builds"]),
            ("warmgraph_loads", "Graphs that this server loaded", snapshot["loads"]),
            ("warmgraph_runs", "Sampler runs through a compiled model", snapshot["runs_made"]),
        ):
            yield CounterMetricFamily(name, words, value=value)
        for name, words, value in (
            (
                "warmgraph_builds_left",
                "Graphs that are being built or wait for it",
                building["total"] - building["done"],
            ),
            ("warmgraph_workers", "Builder processes", building["workers"]),
            ("warmgraph_store_files", "Compiled graphs in the shared store", store["files"]),
            ("warmgraph_store_bytes", "Their size on disk", store["bytes"]),
            ("warmgraph_captured_bytes", "VRAM of captured steps", captured["vram_bytes"]),
            ("warmgraph_warnings", "What a user should look at", len(snapshot["warnings"])),
        ):
            yield GaugeMetricFamily(name, words, value=value)
        step = GaugeMetricFamily(
            "warmgraph_step_seconds",
            "What a step of the last size takes, by how it is made",
            labels=("id", "model", "form"),
        )
        factor = GaugeMetricFamily(
            "warmgraph_speed_ratio",
            "How many times faster a step is than without Warmgraph",
            labels=("id", "model"),
        )
        parts = GaugeMetricFamily(
            "warmgraph_parts", "Parts of a model", labels=("id", "model", "state")
        )
        for report in snapshot["models"]:
            named = (report["id"], report["model"])
            for form, milliseconds in (report["speed"] or {"ms": {}})["ms"].items():
                step.add_metric((*named, form), milliseconds / 1000)
            if report["factor"] is not None:
                factor.add_metric(named, report["factor"])
            for state in ("compiled", "eager"):
                parts.add_metric((*named, state), report["regions"][state])
        yield step
        yield factor
        yield parts
