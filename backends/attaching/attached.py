"""What the engine knows of a host object of any type."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import torch

from ..host_api.models import LatentScale, loaded_model
from ..host_api.patcher import call_back
from ..reasons import Reason
from ..runtime.bound import Placement
from ..runtime.planner import MakePlan
from ..runtime.session import ModelCopy, Session

KEY = "warmgraph"


def when_unloaded(patcher: Any, session: Session) -> None:
    """Notify a session when the host unloads the model of a ModelPatcher."""

    def detached(patcher: Any, unpatch_all: bool) -> None:
        """The host's ON_DETACH callback; also called at each load, with `unpatch_all` false."""
        for scope in session.scopes if unpatch_all else ():
            if scope.holder is loaded_model(patcher):
                scope.unloaded()

    call_back(patcher, "ON_DETACH", KEY, detached)


class Note:
    """Attached in place of a session: why there is none."""

    def __init__(self, text: Reason) -> None:
        self.text = text


class Runs(Protocol):
    """What a session's owner is told about runs.

    `begin` and `end` come in pairs, with the same `told`: whether the host surely reports a run's
    end. If it does not, `stay_busy` is called during the run.
    """

    def begin(
        self, session: Session, placement: Callable[[], Placement] | None, *, told: bool = True
    ) -> None:
        """A run starts: weights may have moved since the last one, and patches may differ.

        Args:
            placement: returns where it runs; its exceptions fail no prompt. None: not the session's
                own module runs, but another one with its wrappers.
        """

    def look(self, session: Session, placement: Callable[[], Placement]) -> None:
        """The host has prepared the model again within the run."""

    def begin_card(
        self, session: Session, card: ModelCopy, placement: Callable[[], Placement]
    ) -> None:
        """A copy of the session's root module takes part in the run."""

    def end(self, session: Session, *, sampled: bool = False, told: bool = True) -> None:
        """The run has ended, with or without an error; `sampled`: it was the prompt's sampling."""

    def stay_busy(self) -> None:
        """The prompt still runs."""

    def await_graphs(self, session: Session) -> None:
        """Wait within a run for pending graphs, if the user chose that."""


class LeftAlone:
    """A host object that is left as it is; `Attached`. It is not inspected."""

    sort = ""
    patcher: Any = None
    root: torch.nn.Module | None = None
    holder: Any = None
    scale: LatentScale | None = None

    def __init__(self, thing: Any, why: Reason, notes: MutableMapping[Any, Note]) -> None:
        """Set up for one object.

        Args:
            thing: the object.
            why: why it is left.
            notes: where the note about it is kept.
        """
        self.value = thing
        self.name = type(thing).__name__
        self.why = why
        self.plan: MakePlan = lambda _: why
        self._notes = notes

    def placement(self) -> Placement:
        raise RuntimeError(self.why)

    def attach(self, session: Session, runs: Runs) -> None:
        raise RuntimeError(self.why)

    def note(self, text: Reason) -> None:
        self._notes[self.value] = Note(text)


class Attached(Protocol):
    """A copy of a host object, to which a session can be attached.

    Attributes:
        sort: "model", "vae" or "controlnet", for ids.
        name: what reports call it.
        value: the copy, of the type that came in; we have put nothing on it yet.
        patcher: the host's ModelPatcher of its weights; None without one.
        root: the module that is cut into regions; None if the host has loaded none.
        holder: the module on which the host notes where its weights are.
        scale: of its latents to images; None if it makes no sampler's steps.
        plan: cuts `root`, or a copy of it, into regions, or says in a line why not; it refers to
            neither, because a session keeps it.
    """

    sort: str
    name: str
    value: Any
    patcher: Any
    root: torch.nn.Module | None
    holder: Any
    scale: LatentScale | None
    plan: MakePlan

    def placement(self) -> Placement:
        """Return where it runs now."""

    def attach(self, session: Session, runs: Runs) -> None:
        """Make `value` run through a session."""

    def note(self, text: Reason) -> None:
        """Keep on `value` why it runs as before."""
