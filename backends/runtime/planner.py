"""How a root module is cut: by its family, or as its own steps show (`learner.Learner`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..graphs.learned_models import LearnedModel
from ..plans.plan import Plan
from ..reasons import Reason
from .faults import Faults

#: Cuts a root module into places, or says why it stays as it is.
MakePlan = Callable[[Any], Plan | Reason]


class RootCall(NamedTuple):
    """A call of the root module that is to be made.

    Attributes:
        args, kwargs: of the call.
        others: why it cannot be identified by its arguments, if so.
        dtype: that the model computes in.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    others: Reason | None
    dtype: torch.dtype


class Planner:
    """Of a root module that a family describes.

    Attributes:
        lesson: what was learned of the module.
        has_news: whether a plan would differ now.
        why_none: why the module is not cut at the moment.
        left: why graphs did not serve the last call, if that was decided here.
        structure: equal for calls for which the same comparisons hold.
    """

    lesson: LearnedModel | None = None
    has_news: bool = False
    why_none: Reason | None = None
    left: Reason | None = None
    structure: object = None

    def __init__(self, make_plan: MakePlan) -> None:
        """Set up; nothing is cut."""
        self._make_plan = make_plan

    def plan(self, root: torch.nn.Module) -> Plan | Reason:
        """Cut the module, or say why it is not cut."""
        return self._make_plan(root)

    def elsewhere(self, root: torch.nn.Module, model: Any) -> Planner:
        """Return one for a copy of the module with its own weights."""
        return Planner(self._make_plan)

    def find(self, folders: Sequence[Path], faults: Faults) -> LearnedModel | None:
        """Return what is known of a module that no family describes, after a look for it."""
        return None

    def let_go(self) -> None:
        """Drop the module and its weights, which the host no longer uses."""
        self._make_plan = lambda _: Plan()

    def begin_run(self) -> None:
        """A run starts."""

    def begin_call(self, call: RootCall, faults: Faults) -> AbstractContextManager[None] | None:
        """Return the context within which the host makes a call; None: it is like any other."""
        return None

    def end_call(self, declined: Sequence[Reason]) -> None:
        """Look back at the call; `declined`: why graphs did not serve some of its blocks."""
