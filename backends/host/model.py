"""MODEL: a clone of the host's ModelPatcher, with a wrapper and two callbacks under our key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..families.catalogue import plan_model
from ..families.plan import Plan
from ..host_api.questions import compute_dtype
from ..runtime.faults import STEP
from ..runtime.scope import Target
from ..runtime.session import Session
from ..runtime.variant import Variant
from .attached import KEY, Note, Runs, when_unloaded


class AttachedModel:
    """A clone of a ModelPatcher; `Attached`."""

    sort = "model"

    def __init__(self, model: Any) -> None:
        """Clone `model` and take what an earlier node of ours left off the clone."""
        from comfy.patcher_extension import CallbacksMP, WrappersMP

        clone = model.clone()
        clone.remove_wrappers_with_key(WrappersMP.DIFFUSION_MODEL, KEY)
        for kind in (CallbacksMP.ON_PRE_RUN, CallbacksMP.ON_CLEANUP):
            clone.remove_callbacks_with_key(kind, KEY)
        self.value = self.patcher = clone
        self.holder = clone.model
        self.name = type(clone.model).__name__
        self.root: torch.nn.Module | None = clone.model.diffusion_model
        self.plan: Callable[[], Plan | str] = partial(plan_model, clone.model.diffusion_model)

    def target(self) -> Target:
        return _target(self.patcher)

    def attach(self, session: Session, runs: Runs) -> None:
        """Hang the session on the clone; the host copies all of it to clones of the clone."""
        from comfy.patcher_extension import CallbacksMP, WrappersMP

        clone = self.value
        clone.set_attachments(KEY, session)
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, partial(_step, session))
        clone.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, _begins(session, runs))
        clone.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, _ends(session, runs))
        when_unloaded(clone, session)

    def note(self, text: str) -> None:
        self.value.set_attachments(KEY, Note(text))


def kept(model: Any) -> Any:
    """Return what `attach` or `note` left on a ModelPatcher, or None."""
    return model.get_attachment(KEY)


def _target(patcher: Any) -> Target:
    current = getattr(patcher.model, "current_patcher", None)
    patches = getattr(current, "object_patches", {})
    # What lies around the diffusion model (sampling, dtypes) is no part of it.
    patches = {n: patch for n, patch in patches.items() if n.startswith("diffusion_model")}
    return Target(patcher.load_device, compute_dtype(patcher), patches)


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
    foreign = None
    root = executor.class_obj
    scope = session.scope.faults.spare(STEP, "preparing a step", session.scope_of, root)
    own = root.call if isinstance(root, Variant) else getattr(root, "_forward", None)
    if scope is None:
        foreign = "another copy of the model runs (hooks or several GPUs)"
    elif executor.original != own:
        foreign = "another node puts its own function in place of the model's"
    inner = None
    if scope is not None and executor.idx + 1 < len(executor.wrappers):
        inner = "another node wraps the model's own call"
        executor.original = partial(scope.innermost, executor.original)
    return session.step(executor, args, kwargs, scope=scope, foreign=foreign, inner=inner)
