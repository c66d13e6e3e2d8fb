"""What is kept where every call of every region is compared with the host's own maths, for a
developer in search of the wrong one (`debugging.Debugging.verify`).

A graph that differs stays in use, but eager's result of each call is used: what follows is compared
on the host's own activations.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..graphs.compiled_graph import CompiledGraph
from ..kinds.tolerance import Judgement, Outcome

logger = logging.getLogger(__name__)


class Verification:
    """What was compared in this process, and which kinds were reported."""

    def __init__(self) -> None:
        """Nothing is compared yet."""
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._calls = 0
        self._different = 0
        self._nearest = 0.0
        self._where = ""

    def take(self) -> str | None:
        """Return a line about what was compared since the last call, None for nothing."""
        with self._lock:
            if not self._calls:
                return None
            line = f"verified {self._calls} calls of regions with eager: "
            line += f"{self._different} differ" if self._different else "none differs"
            if self._where:
                line += f"; nearest to its tolerance ({self._nearest:.0%} of it) is {self._where}"
            self._calls = self._different = 0
            self._nearest, self._where = 0.0, ""
            return line

    def note(
        self,
        place: str,
        graph: CompiledGraph,
        found: Judgement,
        inputs: Sequence[Any],
        weight_class: str,
    ) -> None:
        """Count a comparison; the first difference of a kind is logged.

        Args:
            place: its name.
            inputs: of the call.
            weight_class: of the weights that it took.
        """
        label = graph.description.label
        with self._lock:
            self._calls += 1
            if found.is_good and found.share > self._nearest:
                self._nearest, self._where = found.share, f"{place} ({label})"
            if found.outcome is not Outcome.BAD:
                return
            self._different += 1
            if label in self._told:
                return
            self._told.add(label)
        sizes = ", ".join(
            f"{spec.name} {'x'.join(map(str, v.shape)) if torch.is_tensor(v) else v}"
            for spec, v in zip(graph.description.inputs, inputs, strict=True)
        )
        logger.warning(
            "Region %s (%s) differs from eager by %.1e (relative L2, %.0e is allowed) at %s with "
            "%s weights; eager's result is used. Its graph is %s",
            place,
            label,
            found.error,
            found.error / found.share,
            sizes,
            weight_class,
            graph.key,
        )
