"""MODEL: a clone of the host's ModelPatcher, with a wrapper and two callbacks under our key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..families.catalogue import plan_model
from ..families.plan import Plan
from ..host_api import models
from ..host_api import patcher as host
from ..host_api.layers import bound_forward
from ..runtime.attributes import is_own_method
from ..runtime.faults import STEP
from ..runtime.placing import called_next
from ..runtime.scope import Target
from ..runtime.session import Session
from ..runtime.variant import Variant
from .attached import KEY, Note, Runs, when_unloaded

_COPY = "another copy of the model runs (hooks or several GPUs)"
_REPLACED = "another node puts its own function in place of the model's"


class AttachedModel:
    """A clone of a ModelPatcher; `Attached`."""

    sort = "model"

    def __init__(self, model: Any) -> None:
        """Clone `model` and take what an earlier node of ours left off the clone."""
        clone = host.clone(model)
        host.unwrap(clone, "DIFFUSION_MODEL", KEY)
        host.unwrap(clone, "APPLY_MODEL", KEY)
        host.call_no_more(clone, "ON_PRE_RUN", KEY)
        host.call_no_more(clone, "ON_CLEANUP", KEY)
        root = models.diffusion_model(clone)
        self.value = self.patcher = clone
        self.holder = clone.model
        self.name = models.model_name(clone)
        self.scale: models.LatentScale | None = models.latent_scale(clone)
        self.root: torch.nn.Module | None = root
        self.plan: Callable[[], Plan | str] = partial(plan_model, root)

    def target(self) -> Target:
        return _target(self.patcher)

    def attach(self, session: Session, runs: Runs) -> None:
        """Hang the session on the clone; the host copies all of it to clones of the clone."""
        clone = self.value
        host.attach(clone, KEY, session)
        if bound_forward(self.root) is not None:
            host.wrap(clone, "DIFFUSION_MODEL", KEY, partial(_step, session))
        else:
            host.wrap(clone, "APPLY_MODEL", KEY, partial(_evaluation, session))
        host.call_back(clone, "ON_PRE_RUN", KEY, _begins(session, runs))
        host.call_back(clone, "ON_CLEANUP", KEY, _ends(session, runs))
        when_unloaded(clone, session)

    def note(self, text: str) -> None:
        host.attach(self.value, KEY, Note(text))


def carried(model: Any) -> Any:
    """Return what `attach` or `note` left on a ModelPatcher, or None."""
    return host.attached(model, KEY)


def _target(patcher: Any) -> Target:
    device, dtype = models.load_device(patcher), models.compute_dtype(patcher)
    return Target(device, dtype, models.patched_parts(patcher))


def is_step(wrapper: Any) -> bool:
    """Tell whether a DIFFUSION_MODEL wrapper is Compile Model's."""
    return getattr(wrapper, "func", None) is _step


def _begins(session: Session, runs: Runs) -> Callable[[Any], None]:
    """The host's ON_PRE_RUN callback, called with the patcher that runs: a clone of ours, maybe."""
    return lambda patcher: runs.begin(session, partial(_target, patcher))


def _ends(session: Session, runs: Runs) -> Callable[[Any], None]:
    """The host's ON_CLEANUP callback."""
    return lambda _patcher: runs.end(session, sampled=True)


def _step(session: Session, executor: Any, *args: Any, **kwargs: Any) -> Any:
    """The host's DIFFUSION_MODEL wrapper: one forward of the diffusion model."""
    within = host.wrappers_within(executor)
    if within and host.are_step_caches(within):  # what they do not leave out is one call of ours
        return host.call_innermost(executor, partial(_step, session))(*args, **kwargs)
    foreign = None
    root = host.owner(executor)
    scope = session.scope.faults.spare(STEP, "preparing a step", session.scope_of, root)
    own = root.call if isinstance(root, Variant) else bound_forward(root)
    if scope is None:
        foreign = _COPY
    elif host.innermost(executor) != own:
        foreign = _REPLACED
    inner = None
    if scope is not None and within:
        inner = "another node wraps the model's own call"
        host.put_innermost(executor, partial(scope.innermost, host.innermost(executor)))
    return session.step(executor, args, kwargs, scope=scope, foreign=foreign, inner=inner)


def _evaluation(session: Session, executor: Any, *args: Any, **kwargs: Any) -> Any:
    """The host's APPLY_MODEL wrapper, where it lets nothing be put around the model's forward: the
    one call of it that follows is ours.
    """
    root = models.called_module(host.owner(executor))
    with called_next(root, partial(_forward, session, root)):
        return executor(*args, **kwargs)


def _forward(session: Session, root: Any, *args: Any, **kwargs: Any) -> Any:
    """What the host's call of such a model goes to."""
    scope = session.scope.faults.spare(STEP, "preparing a step", session.scope_of, root)
    foreign = None
    if scope is None:
        foreign = _COPY
    elif "forward" in vars(root) and not is_own_method(root, "forward", root.forward):
        foreign = _REPLACED
    return session.step(root.forward, args, kwargs, scope=scope, foreign=foreign)
