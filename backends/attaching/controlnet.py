"""CONTROL_NET: a copy by the host's own `copy()`, with a few methods put into the instance.

The host has no wrapper around a control network's call, so while one `get_control` runs, the copy's
network attribute is a stand-in whose call goes through the session. `type(copy)` and the network
stay the host's own: other packs tell ControlNets apart by their exact class. Weights and patcher
are shared with the object that came in.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from functools import partial
from typing import Any

import torch

from ..code.packs import owner_of
from ..families.catalogue import plan_model
from ..host_api import controlnets, models
from ..plans.plan import Plan
from ..reasons import Reason, of
from ..runtime.bound import Placement
from ..runtime.faults import STEP
from ..runtime.planner import MakePlan, Planner
from ..runtime.scope import Scope
from ..runtime.session import Session
from .attached import Note, Runs

_PER_RUN = of("network_per_run")


class AttachedControlNet:
    """A copy of a CONTROL_NET; `Attached`. A refused one is returned itself, unchanged."""

    sort = "controlnet"
    scale: models.LatentScale | None = None

    def __init__(self, control: Any, notes: MutableMapping[Any, Note]) -> None:
        """Look at `control`, without what another of our nodes left on it.

        Args:
            notes: where `note` keeps its line, because nothing is written on a refused object.

        Raises:
            TypeError: `control` is no ControlNet of any kind.
        """
        if not controlnets.is_control(control):
            kind = type(control).__name__
            raise TypeError(f"control_net must be a ControlNet of the host, got a {kind}")
        self.value = control if carried(control) is None else plain(control)
        self.name = type(control).__name__
        self.patcher = controlnets.patcher(control)
        self.root: torch.nn.Module | None = getattr(
            control, controlnets.network_attribute(type(control)), None
        )
        if controlnets.is_per_run(type(control)):
            self.root = torch.nn.Module()
        self.holder = self.root
        self.plan: MakePlan = partial(_plan, refusal(self.value))
        self._notes = notes

    def placement(self) -> Placement:
        return _placement(self.value, self.root)

    def attach(self, session: Session, runs: Runs) -> None:
        """Attach the session to a copy; the host's copies of the copy get it, too."""
        self.value = controlnets.copy(self.value)
        if controlnets.is_per_run(type(self.value)):
            session.note(_PER_RUN)
        _hang(self.value, session, runs)

    def note(self, text: Reason) -> None:
        self._notes[self.value] = Note(text)


def carried(control: Any) -> Session | None:
    """Return the session that `attach` put on a CONTROL_NET, or None."""
    hold = getattr(vars(control).get(controlnets.METHODS[0]), "hold", None)
    return hold.session if isinstance(hold, _Hold) else None


def plain(control: Any) -> Any:
    """Return a copy of our CONTROL_NET that runs as the host's."""
    copy = controlnets.copy(control)
    for name in controlnets.METHODS:
        vars(copy).pop(name, None)
    return copy


def refusal(control: Any) -> Reason | None:
    """Say why nothing may be attached to a CONTROL_NET, or None."""
    cls = type(control)
    if not controlnets.is_hosts(cls):
        why = of("not_hosts", name=cls.__name__, owner=owner_of(cls))
        return of("at_normal_speed", why=why)
    for name in controlnets.METHODS:
        if name in vars(control):
            return of("at_normal_speed", why=of("controlnet_replaced", name=name))
    return None


class _Hold:
    """One copy of a CONTROL_NET and its run.

    The host may end a run unreported (Cancel, an error), so a run is over at the latest when the
    next one begins.
    """

    def __init__(self, control: Any, session: Session, runs: Runs) -> None:
        self.session = session
        self._control = weakref.ref(control)  # no cycle: the network is freed with its object
        self._runs = runs
        self._open = False
        self._own: Scope | None = None  # where the network exists for one run only

    def call(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the network once."""
        session, control = self.session, self._control()
        if controlnets.is_per_run(type(control)):
            if self._own is None:
                copy = partial(session.scope.copy, planner=Planner(plan_model), for_one_run=True)
                faults = session.scope.faults
                self._own = faults.spare(STEP, "preparing a ControlNet", copy, module, module)
            if self._own is not None:
                session.scope = self._own  # the host rebuilt the network
        card, not_ours = None, None
        if module is not session.scope.root:
            faults = session.scope.faults
            card = faults.spare(STEP, "preparing a copy", session.card, module, module)
            not_ours = of("copy_of_network") if card is None else None
        if not self._open and not_ours is None:
            self._open = True
            placement = partial(_placement, control, module)
            if card is not None:
                self._runs.begin_card(session, card, placement)
            else:
                self._runs.begin(session, placement, told=False)
            if self._own is not None:
                self._runs.await_graphs(session)
        self._runs.stay_busy()
        scope = None if card is None else card.scope
        return session.step(module, args, kwargs, scope=scope, not_ours=not_ours)

    def end(self) -> None:
        """The run is over, if one was open."""
        if self._open:
            self._open = False
            self._runs.end(self.session, told=False)
        if self._own is not None:
            self._own.faults.spare(STEP, "letting a ControlNet go", self._own.let_go)
            self._own = None


class _Network:
    """Stands for the network while one `get_control` runs: calling it goes through the session."""

    def __init__(self, module: Any, hold: _Hold) -> None:
        self._module, self._hold = module, hold

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hold.call(self._module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _hang(control: Any, session: Session, runs: Runs) -> None:
    """Put our methods into an instance; each does what the host's does, for this object."""
    cls: Any = type(control)
    own, attribute = weakref.ref(control), controlnets.network_attribute(cls)
    hold = _Hold(control, session, runs)

    def get_control(*args: Any, **kwargs: Any) -> Any:
        control = own()
        module = vars(control).get(attribute)
        if module is None:
            return cls.get_control(control, *args, **kwargs)
        setattr(control, attribute, _Network(module, hold))
        try:
            return cls.get_control(control, *args, **kwargs)
        finally:
            setattr(control, attribute, module)

    def copy_to(other: Any) -> None:
        cls.copy_to(own(), other)
        if type(other) is cls:
            session.scope.faults.spare(STEP, "following a copy", _hang, other, session, runs)
        else:
            owner, name = owner_of(type(other)), type(other).__name__
            why = of("took_over", name=name, owner=owner)
            session.note(of("at_normal_speed", why=why))

    def pre_run(*args: Any, **kwargs: Any) -> None:
        hold.end()
        cls.pre_run(own(), *args, **kwargs)

    def cleanup() -> None:
        try:
            cls.cleanup(own())
        finally:
            hold.end()

    def reduce_ex(protocol: Any) -> Any:
        """Copies made past the host's `copy()` are the host's: ours are bound to this object."""
        return controlnets.plain_state(cls, own(), protocol)

    get_control.hold = hold  # type: ignore[attr-defined]
    for name, ours in zip(
        controlnets.METHODS, (get_control, copy_to, pre_run, cleanup, reduce_ex), strict=True
    ):
        vars(control)[name] = ours


def _plan(refused: Reason | None, root: torch.nn.Module | None) -> Plan | Reason:
    if refused is not None:
        return refused
    if root is None:
        return of("at_normal_speed", why=of("no_network"))
    return plan_model(root) if next(root.children(), None) is not None else Plan()


def _placement(control: Any, module: Any) -> Placement:
    """Where a network runs; one that is made at every run, and an adapter, have no patcher."""
    patcher = controlnets.patcher(control)
    return Placement(
        controlnets.device(control),
        controlnets.compute_dtype(control, module),
        {} if patcher is None else models.patched_objects(patcher),
    )
