"""A model that no family describes, at run time: one of its steps is watched, and it is cut by what
is learned. Each place is compared before its graph's results are used (`beside`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from ..errors import LearnError
from ..families.catalogue import plan_model, unread_options
from ..graphs.learned_models import Known, LearnedModel, LearnedModels, unusable
from ..host_api.detected import detected
from ..host_api.layers import bound_forward
from ..host_api.options import NODES
from ..learning.arguments import write_down
from ..learning.calls import names_of
from ..learning.structure import structure_of
from ..learning.values import name_of
from ..learning.watching import Watcher, task
from ..plans.plan import FORWARD, Plan
from ..reasons import Reason, of
from .faults import LEARNING, Faults
from .placing import Placing
from .planner import Planner, RootCall
from .specializations import NOT_CALLED

logger = logging.getLogger(__name__)

#: From here on a whole number is likelier a size than a choice.
_FEW = 8
#: Structures of calls that are known at once.
_MOST_STRUCTURES = 256


def structure_of_call(call: RootCall, unread: frozenset[str]) -> Hashable:
    """Return a name, equal for calls that differ only in sizes and numbers. Sizes of 1 and small
    whole numbers count as different, because code often branches on them.

    Args:
        unread: options that the model's forward does not read.
    """
    positional = tuple(_form(value, unread) for value in call.args)
    return positional, tuple((name, _form(value, unread)) for name, value in call.kwargs.items())


def _form(value: Any, unread: frozenset[str], within: bool = False) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device.type, tuple(size == 1 for size in value.shape)
    if type(value) is dict:
        return frozenset(
            (name, _form(each, unread, True))
            for name, each in value.items()
            if name not in unread and not (isinstance(each, (dict, list)) and not each)
        )
    if isinstance(value, (list, tuple)):
        forms = [_form(each, unread, within) for each in value]
        return frozenset(forms) if within else tuple(forms)
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int and abs(value) < _FEW:
        return value
    return type(value).__qualname__


class Learner(Planner):
    """Learns one root module that no family describes."""

    def __init__(
        self,
        root: torch.nn.Module,
        model: Any,
        lessons: LearnedModels,
        is_on: Callable[[], bool],
        *,
        may_ask: bool,
    ) -> None:
        """Set up; nothing is looked for.

        Args:
            root: the module.
            model: the host's, which holds it.
            lessons: of the process.
            is_on: whether the setting is on, as of the next run.
            may_ask: whether a worker may be asked.
        """
        self._root, self._model, self._lessons = root, model, lessons
        self._is_on, self._may_ask = is_on, may_ask
        self._name = name_of(type(root))
        self._unread = unread_options(root)
        self._planned: Known | None = None
        #: Structures of calls in which blocks were called otherwise than was learned, and how; the
        #: last call's.
        self._odd: dict[Hashable, Reason] = {}
        self._last: Hashable = None
        #: Why graphs did not serve the last call; how it was odd, where it was watched for that.
        self._left: Reason | None = None
        self._watched: Reason | None = None
        #: What stands for each, quick to compare at each place.
        self._structures: dict[Hashable, object] = {}
        self._folders: Sequence[Path] = ()
        self.lesson: LearnedModel | None = None

    def elsewhere(self, root: torch.nn.Module, model: Any) -> Learner:
        return Learner(root, model, self._lessons, self._is_on, may_ask=self._may_ask)

    def look(self, folders: Sequence[Path]) -> None:
        """Look for what is known of the model, before a run puts anything into it."""
        self._folders = folders
        self.lesson = self._lessons.of(structure_of(self._root), folders)

    def find(self, folders: Sequence[Path], faults: Faults) -> LearnedModel:
        """Return what is known of the model, after a `look` if there was none; nothing if that
        fails.
        """
        if self.lesson is None:
            faults.spare(LEARNING, "finding what was learned", self.look, folders)
        if self.lesson is None:
            self.lesson = unusable(faults.of(LEARNING) or of("learned_nowhere"))
        return self.lesson

    def let_go(self) -> None:
        self._root, self._model = torch.nn.Module(), None

    def _known(self) -> Known:
        if self.lesson is None or not self._is_on():
            return Known(problem=of("learned_off"))
        return self.lesson.known

    @property
    def has_news(self) -> bool:  # type: ignore[override]
        now, planned = self._known(), self._planned
        return planned is None or (now.record, now.problem) != (planned.record, planned.problem)

    def plan(self, root: torch.nn.Module) -> Plan | Reason:
        """Cut the model as it was learned, or say why it is not cut."""
        known = self._known()
        if known.problem is None and not self.has_news:  # then its code may have changed
            self.look(self._folders)
        if self.has_news:
            self._odd.clear()
            self._watched = None
        self._planned = self._known()
        if (reason := self.why_none) is not None:
            return reason
        assert self._planned.record is not None
        return plan_model(root, self._planned.record)

    @property
    def why_none(self) -> Reason | None:  # type: ignore[override]
        """Why the model is not cut as it was learned at the moment; None if it is."""
        planned, now = self._planned, self._known()
        if planned is not None and planned.problem is not None:
            return of("at_normal_speed", why=planned.problem)
        if planned is not None and planned.record is not None:
            return None
        if self.left is not None:
            return self.left
        if now.is_pending or now.record is not None:
            return of("learned_soon")
        return of("learned_first") if self._may_ask else of("learned_nowhere")

    @property
    def left(self) -> Reason | None:  # type: ignore[override]
        """Why graphs did not serve the last call, if that was decided here. It need not hold for
        the next call: the watched step may have been learned meanwhile.
        """
        if self._watched is None:
            return self._left
        if self._known().is_pending:
            return of("learned_soon")
        return None if self.has_news else self._watched

    # --- a run --------------------------------------------------------------------------------

    def begin_run(self) -> None:
        self._left = self._watched = None

    def begin_call(self, call: RootCall, faults: Faults) -> AbstractContextManager[None] | None:
        structure, others = structure_of_call(call, self._unread | NODES), call.others
        if len(self._structures) >= _MOST_STRUCTURES:
            self._structures.clear()
        self._last, self.structure = structure, self._structures.setdefault(structure, object())
        if self._is_to_be_watched(structure, faults):
            watch = None
            if others is not None and others.capture_only:
                is_plain = structure_of_call(call, self._unread) == structure
                others = None if is_plain else others
            if others is None:
                watch = faults.spare(LEARNING, "watching a step", self._watch, call)
            if watch is not None:
                self._watched = self._odd.get(structure)
                return watch(faults)
            self._left = None if others is None else of("learned_unseen", why=others)
        elif self._left is not None and self.lesson is not None and self.lesson.known.record:
            self._left = None
        self._watched = None
        return None

    def end_call(self, declined: Sequence[Reason]) -> None:
        ways = [each for each in declined if each.other_way]
        if NOT_CALLED in ways and not self._has_uncalled():
            ways.remove(NOT_CALLED)
        if ways:
            self._odd[self._last] = ways[0]

    # --- learning -------------------------------------------------------------------------------

    def _has_uncalled(self) -> bool:
        record = None if self._planned is None else self._planned.record
        return record is not None and any(
            why["key"] == NOT_CALLED.key for _, why in record["outside"]
        )

    def _is_to_be_watched(self, structure: Hashable, faults: Faults) -> bool:
        lesson = self.lesson
        if lesson is None or not self._may_ask or not self._is_on():
            return False
        wanted = lesson.known.record is None or structure in self._odd
        return wanted and lesson.may_be_watched and faults.of(LEARNING) is None

    def _watch(self, call: RootCall) -> Callable[[Faults], AbstractContextManager[None]] | None:
        """Begin to watch a call; None if nothing can be learned from it."""
        method = getattr(bound_forward(self._root), "__name__", FORWARD)
        names = names_of(getattr(type(self._root), method))
        try:
            facts = {**write_down(call.args, call.kwargs, names), "method": method}
            watcher = Watcher(self._root)
        except LearnError as error:
            assert self.lesson is not None
            self._odd.pop(self._last, None)
            if self.lesson.known.record is None:
                self._lessons.refuse(self.lesson, error.reason)
            return None

        @contextlib.contextmanager
        def watching(faults: Faults) -> Iterator[None]:
            placing = Placing()
            placing.replace(watcher.placed())
            try:
                yield
            finally:
                placing.replace(())
            faults.spare(LEARNING, "learning from a step", self._teach, watcher, facts, call.dtype)

        return watching

    def _teach(self, watcher: Watcher, facts: Mapping[str, Any], dtype: torch.dtype) -> None:
        assert self.lesson is not None
        seen = {**facts, "blocks": watcher.to_plain()}
        self._odd.pop(self._last, None)
        self._lessons.teach(self.lesson, self._name, task(*detected(self._model), dtype, seen))
