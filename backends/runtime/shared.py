"""What all sessions of one server process use together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from ..choices.choices import HOSTS, Choices
from ..cuda_graphs.memory import CapturedMemory
from ..debugging import OFF, Debugging
from ..graphs.learned_models import LearnedModels
from ..graphs.library import Graphs
from ..host_api.needs import Feature
from ..reasons import Reason
from .specializations import Needs
from .verdicts import Verdicts
from .verification import Verification


@dataclass(frozen=True)
class Shared:
    """One of each for the process.

    Attributes:
        graphs: all graphs, found, loaded and built.
        captured: the memory of all captured calls.
        debugging: the developer's switches of this server.
        verification: what is kept where every call of a region is compared with eager, else None.
        choices: chooses the kernels of a graph's operators.
        off: features that are off with this host, and the names that it lacks (`present.missing`).
        lessons: what is known of models that no family describes; None: nothing is learned.
    """

    graphs: Graphs
    captured: CapturedMemory
    debugging: Debugging = OFF
    verification: Verification | None = None
    choices: Choices = HOSTS
    off: Mapping[Feature, Reason] = field(default_factory=dict)
    lessons: LearnedModels | None = None
    _needs: WeakKeyDictionary[Any, Needs] = field(default_factory=WeakKeyDictionary)
    _verdicts: WeakKeyDictionary[Any, Verdicts] = field(default_factory=WeakKeyDictionary)

    def needs_of(self, model: Any) -> Needs:
        """Return what calls of a model have needed; kept as long as the model."""
        return self._needs.setdefault(model, set())

    def verdicts_of(self, model: Any) -> Verdicts:
        """Return which graphs may be used with a model's weights; kept as long as those."""
        return self._verdicts.setdefault(model, Verdicts())
