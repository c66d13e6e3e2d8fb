"""One evaluation of a model: which session serves it, and where the call of its diffusion model
goes.

The host runs a MODEL's wrappers for whatever it evaluates with that MODEL's options: a guider's
second model, one that a sampler swaps in, a copy on another card. And the call of the diffusion
model may bypass its wrapper: to another node's forward, or to another node's module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch

from ..code.packs import foreign_class, owner_of
from ..cuda_graphs.capture_gate import CAPTURE_GATE
from ..host_api import models
from ..host_api import patcher as host
from ..host_api.layers import bound_forward
from ..reasons import Reason, of
from ..runtime.attributes import is_own_method
from ..runtime.bound import Placement
from ..runtime.faults import STEP
from ..runtime.placing import called_next
from ..runtime.root_copy import RootCopy
from ..runtime.session import Session
from ..torch_api.tracing import compiled_from
from .attached import KEY, Runs

_COPY = of("copy_of_model")
_REPLACED = of("function_in_place")
_WRAPPED = of("wraps_call")


class Running(NamedTuple):
    """The current run of a session.

    Attributes:
        model: that runs.
        told: whether the host reported its beginning, and so will report its end.
    """

    model: Any
    told: bool


class _Evaluation:
    """Attributes: the session that serves it, or why none does; whether the diffusion model's call
    reached one; whether forwards are in place around another node's forward, within which it may
    come again.
    """

    def __init__(self, session: Session, why: Reason | None = None) -> None:
        self.session = session
        self.why = why
        self.came = False
        self.is_placed = False


_now: ContextVar[_Evaluation | None] = ContextVar("warmgraph_evaluation", default=None)


def around_evaluation(
    session: Session, runs: Runs, executor: Any, *args: Any, **kwargs: Any
) -> Any:
    """The host's APPLY_MODEL wrapper."""
    model = host.owner(executor)
    faults = session.scope.faults
    found = faults.spare(STEP, "preparing a step", _evaluation, session, runs, model)
    now = found or _Evaluation(session)
    host.put_innermost(executor, partial(_evaluate, now, model, host.innermost(executor)))
    token = _now.set(now)
    try:
        with CAPTURE_GATE.evaluation():
            return executor(*args, **kwargs)
    finally:
        _now.reset(token)


def around_step(session: Session, executor: Any, *args: Any, **kwargs: Any) -> Any:
    """The host's DIFFUSION_MODEL wrapper: one forward of the diffusion model."""
    if torch.compiler.is_compiling():  # another node runs the whole model
        return executor(*args, **kwargs)
    within = host.wrappers_within(executor)
    if within and host.are_step_caches(within):  # what they do not leave out is one of our calls
        return host.call_innermost(executor, partial(around_step, session))(*args, **kwargs)
    now = _now.get() or _Evaluation(session)
    now.came = True
    session, root = now.session, host.owner(executor)
    scope = session.scope.faults.spare(STEP, "preparing a step", session.scope_of, root)
    own = root.call if isinstance(root, RootCopy) else bound_forward(root)
    not_ours, no_capture = now.why, None
    if not_ours is None and scope is None:
        not_ours = _COPY
    elif not_ours is None and host.innermost(executor) != own:
        not_ours = _REPLACED
    if scope is not None and within:
        no_capture = _WRAPPED
        host.put_innermost(executor, partial(scope.innermost, host.innermost(executor)))
    if now.is_placed:
        return executor(*args, **kwargs)
    return session.step(
        executor, args, kwargs, scope=scope, not_ours=not_ours, no_capture=no_capture
    )


def is_step(wrapper: Any) -> bool:
    """Tell whether a DIFFUSION_MODEL wrapper is Compile Model's."""
    return getattr(wrapper, "func", None) is around_step


def why_no_step(patcher: Any) -> Reason:
    """Say why no step of a run came to a session."""
    for function in models.calls_replaced(patcher):
        return of("runs_own_way", owner=owner_of(function))
    root = models.diffusion_model(patcher)
    return _theirs(root) or foreign_class(type(root)) or of("no_step")


def placement_of(patcher: Any) -> Placement:
    """Return where a MODEL runs now."""
    device, dtype = models.load_device(patcher), models.compute_dtype(patcher)
    return Placement(device, dtype, models.patched_parts(patcher))


def _evaluation(session: Session, runs: Runs, model: Any) -> _Evaluation:
    """Find the session of the model that is evaluated."""
    if any(model is scope.holder for scope in session.scopes):
        return _Evaluation(session)
    patcher = models.running_on(model)
    theirs = None if patcher is None else host.attached(patcher, KEY)
    if isinstance(theirs, Session) and theirs.scope.holder is model:
        if theirs.running is None:  # the host has not reported its run, and will not report its end
            theirs.running = Running(model, told=False)
            session.guests.append(theirs)
            runs.begin(theirs, partial(placement_of, patcher), told=False)
        return _Evaluation(theirs)
    return _Evaluation(session, _COPY if theirs is session else of("another_model"))


def _evaluate(
    now: _Evaluation, model: Any, evaluate: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Make the host's evaluation within all other wrappers, which may have redirected the call in
    it.
    """
    faults, root = now.session.scope.faults, now.session.scope.root
    found = faults.spare(STEP, "preparing a step", _route, now, models.called_module(model))
    is_ours, why = found or (False, None)
    if is_ours:
        with called_next(root, partial(_forward, now, root)):
            return evaluate(*args, **kwargs)
    result = evaluate(*args, **kwargs)
    if why is not None and not now.came:
        now.session.leave(why)
    return result


def _route(now: _Evaluation, called: Any) -> tuple[bool, Reason | None]:
    """Tell whether the call of the diffusion model must be redirected here, because none of our
    wrappers lies around it, and why it must not come here at all.
    """
    root = now.session.scope.root
    if now.why is not None or called is not root:
        return False, now.why or _instead(called, root)
    return bound_forward(root) is None or _theirs(root) is not None, None


def _forward(now: _Evaluation, root: Any, *args: Any, **kwargs: Any) -> Any:
    """Where the host's call of a model goes, if the host has no wrappers around the model's
    forward, or another node has replaced it.
    """
    session, not_ours = now.session, None
    scope = session.scope.faults.spare(STEP, "preparing a step", session.scope_of, root)
    no_capture = _theirs(root)
    if scope is None:
        not_ours = _COPY
    elif not scope.plan.places:
        not_ours, no_capture = no_capture, None
    now.came, now.is_placed = True, no_capture is not None
    try:
        return session.step(
            root.forward, args, kwargs, scope=scope, not_ours=not_ours, no_capture=no_capture
        )
    finally:
        now.is_placed = False


def _theirs(root: Any) -> Reason | None:
    """Say whose forward is in place of a root module's, None if it is the model's own."""
    forward = vars(root).get("forward")
    if forward is None or is_own_method(root, "forward", forward):
        return None
    return of("forward_in_place", owner=owner_of(forward))


def _instead(called: Any, root: Any) -> Reason:
    """Say what is called in place of a root module."""
    if compiled_from(called) is root:
        return of("torch_compile")
    return of("puts_in_place", owner=owner_of(type(called)), name=type(called).__name__)
