"""MODEL: a clone of the host's ModelPatcher with wrappers and callbacks under our key."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..families.catalogue import plan_model
from ..host_api import models
from ..host_api import patcher as host
from ..reasons import Reason
from ..runtime.bound import Placement
from ..runtime.faults import STEP, TELLING
from ..runtime.planner import MakePlan
from ..runtime.session import Session
from ..several_cards.order import around_batch
from .attached import KEY, Note, Runs, when_unloaded
from .evaluation import Running, around_evaluation, around_step, placement_of, why_no_step


class AttachedModel:
    """A clone of a ModelPatcher; `Attached`."""

    sort = "model"

    def __init__(self, model: Any) -> None:
        """Clone `model` and remove from the clone what another of our nodes left."""
        clone = host.clone(model)
        host.unwrap(clone, "DIFFUSION_MODEL", KEY)
        host.unwrap(clone, "APPLY_MODEL", KEY)
        host.unwrap(clone, "CALC_COND_BATCH", KEY)
        host.call_no_more(clone, "ON_PRE_RUN", KEY)
        host.call_no_more(clone, "ON_CLEANUP", KEY)
        root = models.diffusion_model(clone)
        self.value = self.patcher = clone
        self.holder = models.loaded_model(clone)
        self.name = models.model_name(clone)
        self.scale: models.LatentScale | None = models.latent_scale(clone)
        self.root: torch.nn.Module | None = root
        self.plan: MakePlan = plan_model

    def placement(self) -> Placement:
        return placement_of(self.patcher)

    def attach(self, session: Session, runs: Runs) -> None:
        """Attach the session to the clone; the host copies it to clones of the clone."""
        clone = self.value
        host.attach(clone, KEY, session)
        host.wrap(clone, "DIFFUSION_MODEL", KEY, partial(around_step, session))
        host.wrap(clone, "APPLY_MODEL", KEY, partial(around_evaluation, session, runs))
        batch = partial(around_batch, session.cards.order, partial(_spare, session))
        host.wrap(clone, "CALC_COND_BATCH", KEY, batch)
        host.call_back(clone, "ON_PRE_RUN", KEY, _begins(session, runs))
        host.call_back(clone, "ON_CLEANUP", KEY, _ends(session, runs))
        when_unloaded(clone, session)

    def note(self, text: Reason) -> None:
        host.attach(self.value, KEY, Note(text))


def carried(model: Any) -> Any:
    """Return what `attach` or `note` left on a ModelPatcher, or None."""
    return host.attached(model, KEY)


def _spare(session: Session, task: Callable[[], Any]) -> Any:
    return session.scope.faults.spare(STEP, "preparing a step", task)


def _begins(session: Session, runs: Runs) -> Callable[[Any], None]:
    """The host's ON_PRE_RUN callback, called with the patcher that runs: our clone, or one that the
    host has made of it for another card or with its own weights.
    """

    def begins(patcher: Any) -> None:
        model, before = models.loaded_model(patcher), session.running
        is_own, faults = model is session.scope.holder, session.scope.faults
        if is_own and before is not None:
            session.running = Running(model, before.told)
            runs.look(session, partial(placement_of, patcher))
        elif before is None:
            session.running = Running(model, told=True)
            session.cards.begin_run()
            runs.begin(session, partial(placement_of, patcher) if is_own else None)
        if not is_own:
            faults.spare(STEP, "preparing a copy", _begins_copy, session, runs, patcher)
        runs.await_graphs(session)  # a LoRA in bypass mode is added when the model is loaded

    return begins


def _begins_copy(session: Session, runs: Runs, patcher: Any) -> None:
    card = session.card(models.diffusion_model(patcher), models.loaded_model(patcher))
    runs.begin_card(session, card, partial(placement_of, patcher))


def _miss(session: Session, patcher: Any) -> None:
    session.miss(why_no_step(patcher))


def _ends(session: Session, runs: Runs) -> Callable[[Any], None]:
    """The host's ON_CLEANUP callback."""

    def ends(patcher: Any) -> None:
        running = session.running
        if running is None or running.model is not models.loaded_model(patcher):
            return
        session.running = None
        if not session.came and sys.exc_info()[1] is None:
            session.scope.faults.spare(TELLING, "telling what ran", _miss, session, patcher)
        runs.end(session, sampled=True, told=running.told)
        while session.guests:
            guest = session.guests.pop()
            if guest.running is not None and not guest.running.told:
                guest.running = None
                runs.end(guest, told=False)

    return ends
