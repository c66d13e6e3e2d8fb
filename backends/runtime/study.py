"""A model that no family describes, at run time: a step of it is watched, what is learned cuts it,
and one whole step is compared before any result is given on.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..cuda_graphs.replays import EXACT
from ..errors import LearnError
from ..families.catalogue import plan_model, unread_options
from ..graphs.lessons import Known, Lesson, Lessons, unusable
from ..host_api.detected import detected
from ..host_api.layers import bound_forward
from ..host_api.options import NODES
from ..kinds.layout import elements_of
from ..learning.arguments import write_down
from ..learning.calls import names_of
from ..learning.structure import structure_of
from ..learning.values import name_of
from ..learning.watching import Watcher, task
from ..operators import host_layer
from ..plans.plan import FORWARD, Plan
from ..reasons import Reason, of
from .faults import LEARNING, Faults
from .forwards import Forwards, ForwardSet
from .making import Made, Step
from .placing import Placing
from .proof import Make, prove, structure_of_call
from .trust import REACH
from .variations import Account

logger = logging.getLogger(__name__)

#: Whole steps that say nothing, or in which no graph served, before no more are made twice.
MOST_UNSURE = 3
#: Says that a call cannot be captured, and nothing of other nodes.
_HARMLESS = "on_cpu"
#: What a call that was declined for shows another way in which blocks are called.
_OTHER_WAYS = frozenset({"learned_another", "learned_option"})
#: Of what it was called with that no graph may compute.
_NO_GRAPH = "learned_no_graph"
_LEFT = ForwardSet([], EXACT)


class Study:
    """What becomes of one root module that no family describes.

    Attributes:
        left: why graphs did not serve the last call, where that was decided here.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        model: Any,
        lessons: Lessons,
        is_on: Callable[[], bool],
        *,
        may_ask: bool,
    ) -> None:
        """Set up; nothing is looked for.

        Args:
            root: the module.
            model: the host's, which holds it.
            lessons: of the process.
            is_on: whether the user wants it, from the next run on.
            may_ask: whether a worker may be asked.
        """
        self._root, self._model, self._lessons = root, model, lessons
        self._is_on, self._may_ask = is_on, may_ask
        self._name = name_of(type(root))
        self._unread = unread_options(root)
        self._planned: Known | None = None
        #: Structures of calls in which blocks were called otherwise than was learned; the last
        #: call's, and how many calls of blocks were declined for that.
        self._odd: set[Hashable] = set()
        self._last: Hashable = None
        self._declined = 0
        #: Elements of the last call.
        self._size = 0
        #: What a call of places that had run in no whole step would have to be compared for anew,
        #: what the last call was made by, where that were not all places, and how many calls of
        #: blocks found no graph.
        self._wanted: set[Hashable] = set()
        self._part: Hashable = None
        self._without = 0
        #: Whole steps that told nothing, or nothing more, by what they would have spoken for.
        self._unsure: Counter[Hashable] = Counter()
        self._graphs: tuple[ForwardSet, Hashable] = (_LEFT, ())
        self._folders: Sequence[Path] = ()
        self.lesson: Lesson | None = None
        self.left: Reason | None = None

    def elsewhere(self, root: torch.nn.Module, model: Any) -> Study:
        """Return one for a copy of the module that has weights of its own."""
        return Study(root, model, self._lessons, self._is_on, may_ask=self._may_ask)

    def look(self, folders: Sequence[Path]) -> None:
        """Look for what is known of the model, as it is before anything of a run is put into it."""
        self._folders = folders
        self.lesson = self._lessons.of(structure_of(self._root), folders)

    def find(self, folders: Sequence[Path], faults: Faults) -> Lesson:
        """Return what is known of the model, after a `look` if that was not asked yet; where that
        fails nothing is used.
        """
        if self.lesson is None:
            faults.spare(LEARNING, "finding what was learned", self.look, folders)
        if self.lesson is None:
            self.lesson = unusable(faults.of(LEARNING) or of("learned_nowhere"))
        return self.lesson

    def let_go(self) -> None:
        """Drop the module and its weights, which the host is done with."""
        self._root, self._model, self._graphs = torch.nn.Module(), None, (_LEFT, ())

    def _known(self) -> Known:
        if self.lesson is None or not self._is_on():
            return Known(problem=of("learned_off"))
        return self.lesson.known

    @property
    def has_news(self) -> bool:
        """Whether a plan would be another one now."""
        now, planned = self._known(), self._planned
        return planned is None or (now.record, now.problem) != (planned.record, planned.problem)

    @property
    def is_dropped(self) -> bool:
        """Whether what was learned, and is in force, must not be used any more."""
        planned = self._planned
        return planned is not None and planned.problem is None and self._known().problem is not None

    def plan(self) -> Plan | Reason:
        """Cut the model as it was learned, or say why it is not cut."""
        known = self._known()
        if known.problem is None and not self.has_news:  # then its code may be another by now
            self.look(self._folders)
        self._planned = self._known()
        self._unsure.clear()
        if (reason := self.why_none) is not None:
            return reason
        assert self._planned.record is not None
        return plan_model(self._root, self._planned.record)

    @property
    def why_none(self) -> Reason | None:
        """Why the model is not cut as it was learned, as things are now; None where it is."""
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

    # --- a run --------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """A run starts."""
        self.left = None

    def step(
        self,
        step: Step,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        device: torch.device,
        others: Reason | None,
        dtype: torch.dtype,
        faults: Faults,
        account: Account,
        forwards: Forwards,
    ) -> Step | ForwardSet:
        """Say how a call is to be made, or what serves one that is made as any other.

        Args:
            step: how it would be.
            device: where it runs.
            others: why the call is not to be made twice, or cannot be known by what it shows.
            dtype: that the model computes in.
            faults: of the model.
            account: what its regions note.
            forwards: its.
        """
        self._look_back(account.declined)
        self._last = structure = structure_of_call(args, kwargs, self._unread)
        self._size, _ = elements_of((*args, *kwargs.values()))
        if others is not None:  # what speaks for it is the same step without other nodes
            self._last = structure_of_call(args, kwargs, self._unread | NODES)
            if others.key == _HARMLESS and self._last == structure:
                others = None
        if self._is_to_be_watched(structure, faults):
            watch = None
            if others is None:
                watch = faults.spare(LEARNING, "watching a step", self._watch, args, kwargs)
            if watch is not None:
                return Step(_LEFT, watch=watch(dtype, faults))
            self.left = None if others is None else of("learned_unseen", why=others)
        if not step.serving.installed:
            return step.serving
        serving = self.proven_now(forwards)
        key = self._key(step.serving)
        is_short = len(serving.regions) < len(step.serving.regions)
        if is_short and (not serving.installed or key in self._wanted):
            if others is None and self._unsure[key] < MOST_UNSURE:
                proof = partial(self._prove, key, device=device, forwards=forwards)
                return step._replace(proof=proof, replays=None, pieces=None)
            if not serving.installed:
                self.left = of("learned_unproven", why=others or of("learned_unsure"))
                return Step(_LEFT)
        self.left = None
        self._part = key if is_short else None
        return serving

    def proven_now(self, forwards: Forwards) -> ForwardSet:
        """Return what serves a call like the last one: of what has a graph, the places that ran in
        a whole step that was the host's.
        """
        proven = self._proven.get(self._key(forwards.now), {})
        places = frozenset(n for n, most in proven.items() if self._size <= REACH * most)
        all_places = {region.place.name for region in forwards.now.regions}
        return forwards.now if all_places <= places else forwards.only(places)

    # --- learning -------------------------------------------------------------------------------

    def _look_back(self, declined: Mapping[str, int]) -> None:
        """Note whether the call before showed another way, or wanted a place that ran in no whole
        step.
        """
        count = sum(declined.get(key, 0) for key in _OTHER_WAYS)
        if count > self._declined:
            self._declined = count
            self._odd.add(self._last)
        without = declined.get(_NO_GRAPH, 0)
        if without > self._without and self._part is not None:
            self._wanted.add(self._part)
        self._without, self._part = without, None

    def _is_to_be_watched(self, structure: Hashable, faults: Faults) -> bool:
        lesson = self.lesson
        if lesson is None or not self._may_ask or not self._is_on():
            return False
        wanted = lesson.known.record is None or structure in self._odd
        return wanted and lesson.may_be_watched and faults.of(LEARNING) is None

    def _watch(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., contextlib.AbstractContextManager[None]] | None:
        """Begin to watch a call; None where nothing can be learned of it."""
        method = getattr(bound_forward(self._root), "__name__", FORWARD)
        names = names_of(getattr(type(self._root), method))
        try:
            facts = {**write_down(args, kwargs, names), "method": method}
            watcher = Watcher(self._root)
        except LearnError as error:
            assert self.lesson is not None
            self._odd.discard(self._last)
            if self.lesson.known.record is None:
                self._lessons.refuse(self.lesson, error.reason)
            return None

        @contextlib.contextmanager
        def watching(dtype: torch.dtype, faults: Faults) -> Iterator[None]:
            placing = Placing()
            placing.replace(watcher.placed())
            try:
                yield
            finally:
                placing.replace(())
            faults.spare(LEARNING, "learning from a step", self._teach, watcher, facts, dtype)

        return watching

    def _teach(self, watcher: Watcher, facts: Mapping[str, Any], dtype: torch.dtype) -> None:
        assert self.lesson is not None
        seen = {**facts, "blocks": watcher.to_plain()}
        self._odd.discard(self._last)
        self._lessons.teach(self.lesson, self._name, task(*detected(self._model), dtype, seen))

    # --- whole steps ----------------------------------------------------------------------------

    @property
    def _proven(self) -> dict[Hashable, dict[str, int]]:
        assert self.lesson is not None
        return self.lesson.proven

    def _key(self, serving: ForwardSet) -> Hashable:
        """What a whole step speaks for: all graphs that may serve, and the call's structure."""
        if self._graphs[0] is not serving:
            graphs = tuple(
                (region.place.name, graph.key, graph.loaded and graph.loaded.payload_sha256)
                for region in serving.regions
                for graph in region.graphs
            )
            self._graphs = serving, (graphs, serving.aids)
        return self._graphs[1], self._last

    def _prove(
        self,
        key: Hashable,
        ours: Make,
        theirs: Make,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        device: torch.device,
        forwards: Forwards,
    ) -> Made:
        """Make a step twice, and give on the host's result.

        Args:
            key: what it speaks for (`step`).
            ours, theirs: make it by graphs, and as the host does.
            device: where it runs.
            forwards: the model's.

        Raises:
            As `proof.prove`.
        """
        ran: set[str] = set()
        with forwards.watched(ran):
            modules = (r.graph.description.module for r in self._graphs[0].regions)
            rounds = any(any(host_layer.paths(each)) for each in modules)
            proven = prove(self._root, device, ours, theirs, args, kwargs, is_quantised=rounds)
        assert self.lesson is not None
        if proven.is_good is False:
            assert proven.problem is not None
            reason = of("learned_dropped", why=proven.problem)
            logger.warning("Warmgraph: %s runs at normal speed: %s", self._name, reason)
            self._lessons.refuse(self.lesson, reason)
        known = self._proven.get(key, {})
        more = {name: self._size for name in ran if self._size > known.get(name, 0)}
        if proven.is_good and more:
            self._proven[key] = {**known, **more}
        else:
            self._unsure[key] += 1
        self._wanted.discard(key)
        return Made(proven.result, None)
