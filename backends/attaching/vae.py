"""VAE: a shallow copy of the host's object whose class is a subclass made for it.

Weights and first-stage model are shared with the VAE that came in; the patcher is a clone, as for a
MODEL. The copy's four public methods put our `decode` and `encode` into the first-stage model's
instance while one of them runs; no other VAE ever sees them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any, Literal

import torch

from ..families.catalogue import plan_model
from ..host_api import models, vaes
from ..host_api import patcher as host
from ..plans.plan import Plan
from ..reasons import Reason, of
from ..runtime.bound import Placement
from ..runtime.faults import STEP
from ..runtime.planner import MakePlan
from ..runtime.scope import Scope
from ..runtime.session import ModelCopy, Session
from .attached import KEY, Note, Runs, when_unloaded

logger = logging.getLogger(__name__)

BOTH = "decoder and encoder"
PARTS = (BOTH, "decoder", "encoder")


class AttachedVAE:
    """A copy of a VAE; `Attached`."""

    sort = "vae"
    scale: models.LatentScale | None = None

    def __init__(self, vae: Any, parts: str = BOTH) -> None:
        """Copy `vae`, without what another of our nodes left on it.

        Args:
            parts: one of `PARTS`: what is to be compiled.

        Raises:
            TypeError: `vae` is no VAE of the host.
            ValueError: `parts` is not one of `PARTS`.
        """
        if not vaes.is_vae(vae):
            raise TypeError(f"vae must be a VAE of the host, got a {type(vae).__name__}")
        if parts not in PARTS:
            raise ValueError(f"parts must be one of {', '.join(PARTS)}, got {parts!r}")
        self.value = copy.copy(vae)
        self.value.__class__ = getattr(type(vae), "warmgraph_host_class", type(vae))
        self.value.__dict__.pop(KEY, None)
        self.patcher = vaes.patcher(vae)
        if self.patcher is not None:  # others' patches must not reach `vae`
            self.patcher = host.clone(self.patcher)
            vaes.put_patcher(self.value, self.patcher)
        self.root = vaes.first_stage_model(vae)
        self.holder = self.root
        self.name = type(self.root).__name__
        self.plan: MakePlan = partial(_plan, parts)

    def placement(self) -> Placement:
        return _placement(self.value)

    def attach(self, session: Session, runs: Runs) -> None:
        """Attach the session to the copy."""
        self.value.__class__ = _compiled_class(type(self.value))  # type: ignore[arg-type]
        self.value.__dict__[KEY] = _Attachment(session, runs)
        when_unloaded(self.patcher, session)

    def note(self, text: Reason) -> None:
        self.value.__dict__[KEY] = Note(text)


def carried(vae: Any) -> Any:
    """Return the session or the note that a VAE carries, or None."""
    found = vae.__dict__.get(KEY)
    return found.session if isinstance(found, _Attachment) else found


class _Attachment:
    def __init__(self, session: Session, runs: Runs) -> None:
        self.session = session
        self._runs = runs
        self._open = False
        #: What stands on the first-stage model in a run, by name, and what it calls: the same in
        #: each, so that nothing seems to have changed.
        self._calls: dict[str, tuple[Any, Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attachment:
        return self  # a deep copy has its own weights and scope

    @contextlib.contextmanager
    def scope(self, vae: Any) -> Iterator[None]:
        """One call of the VAE: its first-stage model runs through the session."""
        card = None if self._open else self._card_of(vae)
        if card is None:  # the host's methods may call one another
            yield
            return
        self._open = True
        try:
            # Before the run begins, so that the model looks the same whenever it is looked at.
            with self._placed(card or self.session) as undo:
                if not self._begins(vae, card or None):
                    undo()
                yield
        finally:
            self._open = False
            self._runs.end(self.session)

    @contextlib.contextmanager
    def _placed(self, whose: Session | ModelCopy) -> Iterator[Callable[[], None]]:
        """Put our calls on a first-stage model; yields what removes them early."""
        scope = whose.scope
        own, before = scope.root.__dict__, {}
        for name in vaes.CALLS:
            theirs = getattr(scope.root, name, None)
            if theirs is not None:
                before[name] = own.get(name)
                own[name] = self._our_call(scope, name, theirs)

        def undo() -> None:
            while before:
                name, theirs = before.popitem()
                if theirs is None:
                    del own[name]
                else:
                    own[name] = theirs

        try:
            yield undo
        finally:
            undo()

    def _our_call(self, scope: Scope, name: str, theirs: Any) -> Any:
        if scope is not self.session.scope:  # a copy must be freed when the host drops it
            return partial(_call, self.session, scope, theirs)
        if name not in self._calls or self._calls[name][0] != theirs:
            self._calls[name] = theirs, partial(_call, self.session, scope, theirs)
        return self._calls[name][1]

    def _card_of(self, vae: Any) -> ModelCopy | Literal[False] | None:
        """Whose call it is: a copy's on another card; False: the model's own; None: not ours."""
        session, root = self.session, vaes.first_stage_model(vae)
        if root is session.scope.root:
            return False
        card = None
        if root is not None:
            faults = session.scope.faults
            card = faults.spare(STEP, "preparing a copy", session.card, root, root)
        if card is None:
            session.count_eager(of("copy_of_vae"))
        return card

    def _begins(self, vae: Any, card: ModelCopy | None) -> bool:
        """Begin a run."""
        session = self.session
        try:
            session.cards.begin_run()
            self._runs.begin(session, partial(_placement, vae) if card is None else None)
            if card is not None:
                self._runs.begin_card(session, card, partial(_placement, vae))
        except Exception as error:  # nothing may fail a decode that eager would have finished
            logger.exception("The VAE runs as without Warmgraph")
            session.note(of("ran_at_normal_speed", error=error))
            return False
        return True


def _plan(parts: str, root: torch.nn.Module | None) -> Plan | Reason:
    if root is None:
        return of("at_normal_speed", why=of("vae_no_weights"))
    plan = plan_model(root)
    if isinstance(plan, Plan) and parts != BOTH:
        plan.dispatches = [d for d in plan.dispatches if _is_of(parts, d.regions[0].name)]
        plan.outside = [(name, reason) for name, reason in plan.outside if _is_of(parts, name)]
        if not plan.dispatches and not plan.outside:
            name = type(root).__name__
            why = of("part_not_compiled", model=name, part=parts)
            return of("at_normal_speed", why=why)
    return plan


def _is_of(part: str, place: str) -> bool:
    """Whether a place is in the encoder or decoder, which TAESD calls `taesd_encoder`, ...."""
    return part in place.partition(".")[0]


def _placement(vae: Any) -> Placement:
    patcher = vaes.patcher(vae)
    device, patches = models.load_device(patcher), models.patched_objects(patcher)
    return Placement(device, vaes.compute_dtype(vae), patches)


def _call(
    session: Session, scope: Scope, host: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return session.step(host, args, kwargs, scope=scope)


@cache
def _compiled_class(host: Any) -> type:
    """A subclass of the host's class: the same name, four methods within our scope."""
    body: dict[str, Any] = {
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__doc__": host.__doc__,
        "warmgraph_host_class": host,
    }
    for name in vaes.METHODS:
        if hasattr(host, name):
            body[name] = _within_scope(getattr(host, name))
    return type(host.__name__, (host,), body)


def _within_scope(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.__dict__[KEY].scope(self):
            return method(self, *args, **kwargs)

    return scoped
