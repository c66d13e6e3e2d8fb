"""A record: what was learned of a model, as JSON-plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..errors import LearnError
from ..host_api.detected import root_of
from ..reasons import of
from .arguments import Variable, WatchedCall
from .blocks import why_not
from .branches import by_ranges
from .family import reason_of
from .notes import Listener
from .steps import FakeCall, MetaModel
from .together import MAX_ALL_WAYS, MAX_WAYS
from .values import name_of, put_together
from .ways import Way, digest, learn_way

#: In what is told of each.
Record = dict[str, Any]


def learn(task: Mapping[str, Any]) -> Record:
    """Learn how a model calls its blocks.

    Args:
        task: `watching.task`: the model's class and settings, and what was watched.

    Returns:
        As `learn_root`.

    Raises:
        LearnError: nothing can be learned of this model.
    """
    settings = put_together(task["settings"], ())
    return learn_root(partial(root_of, task["model"], settings), task["watched"], task["dtype"])


def learn_root(
    make: Callable[[torch.dtype], torch.nn.Module], watched: Mapping[str, Any], dtype: str
) -> Record:
    """As `learn`, of a root module.

    Args:
        make: builds it, in a dtype that it computes in.
        watched: a call of it (`watching.Watched`).
        dtype: in which it computed then.

    Returns:
        "root" (the name of its class), "ways" (digest and contents of each), "blocks" (of each
            learned one its name, class, and ways: digest, and the ignored numbers of its call), and
            "outside" (name and reason of each other one).

    Raises:
        LearnError: nothing can be learned of this model.
    """
    listener = Listener()
    lesson = _Lesson(make, watched, dtype, listener)
    with listener.attending():
        lesson.make_steps()
        return lesson.record()


class _Lesson:
    """The results of running one model's step."""

    def __init__(
        self, make: Any, watched: Mapping[str, Any], dtype: str, listener: Listener
    ) -> None:
        self._listener = listener
        self._twin = MetaModel(make, dtype, listener)
        self._call = WatchedCall(watched, dtype)
        self._watched = dict(watched["blocks"])
        self._other_dtype = "bfloat16" if dtype == "float32" else "float32"
        self._other_twin = MetaModel(make, self._other_dtype, listener)
        self._objections = {name: why_not(block) for name, block in self._twin.blocks.items()}
        self._base: dict[str, list[FakeCall]] = {}
        self._other: dict[str, list[FakeCall]] = {}
        self._runs: list[tuple[list[Variable], dict[str, list[FakeCall]]]] = []
        #: Sizes of the step that the model takes no others for.
        self._fixed: list[str] = []
        self._ways: dict[str, Way] = {}
        self._ranges: dict[tuple[str, str], list[Way]] = {}

    def make_steps(self) -> None:
        """Make the watched step, in another dtype, and at other sizes."""
        self._base = self._twin.step(self._call, trying=True)
        if self._twin.looks(self._call):
            raise LearnError(of("learned_looks"))
        self._other = self._other_twin.step(self._call)
        self._vary()

    def _vary(self) -> None:
        good: list[Variable] = []
        for several in self._call.variables():
            if any(several[0].varies_with(each) for each in good):
                continue
            for variable in several:
                try:
                    self._run([variable])
                except LearnError:
                    continue
                good.append(variable)
                break
            else:
                if self._call.must_vary(several[0]):
                    self._fixed.append(several[0].name)
        for together in (good, [each.smallest() for each in good]):
            try:
                return self._run(together)
            except LearnError:
                continue
        self._fixed += [each.name for each in good]

    def _run(self, variables: list[Variable]) -> None:
        sizes = self._call.changed(variables)
        self._runs.append((variables, self._twin.step(self._call, sizes)))

    def record(self) -> Record:
        """What was learned."""
        blocks, outside = [], []
        for name, block in self._twin.blocks.items():
            try:
                ways = self._of_block(name, block)
            except LearnError as error:
                outside.append([name, error.reason.to_plain()])
                continue
            blocks.append([name, name_of(type(block)), ways])
        if len(self._ways) > MAX_ALL_WAYS:
            reason = of("learned_ways", most=MAX_ALL_WAYS).to_plain()
            outside += [[name, reason] for name, *_ in blocks]
            blocks, self._ways = [], {}
        return {
            "root": name_of(type(self._twin.root)),
            "ways": [[key, way] for key, way in self._ways.items()],
            "blocks": blocks,
            "outside": outside,
        }

    def _of_block(self, name: str, block: torch.nn.Module) -> list[Any]:
        if (reason := self._objections[name]) is not None:
            raise LearnError(reason)
        calls, seen = self._base.get(name, []), self._watched.get(name, [])
        if not seen:
            raise LearnError(of("learned_not_called"))
        for each in seen:
            if each["problem"] is not None:
                raise LearnError(reason_of(each["problem"]))
        others = [seen.get(name, []) for seen in (*(made for _, made in self._runs), self._other)]
        for made in chain(calls, *others):
            if made.problem is not None:
                raise LearnError(made.problem)
        if [_plain(made.to_plain()) for made in calls] != seen:
            raise LearnError(of("learned_unlike"))
        if self._fixed:
            raise LearnError(of("learned_one_size", name=", ".join(self._fixed)))
        found: list[Any] = []
        learned: dict[str, Way] = {}
        for number, call in enumerate(calls):
            for way in self._ways_of_call(name, number, block):
                key = digest(way)
                learned[key] = way
                idle = _idle(call)
                if [key, idle] not in found:
                    found.append([key, idle])
        if len(found) > MAX_WAYS:
            raise LearnError(of("learned_ways", most=MAX_WAYS))
        if len({tuple(n for n, _ in way["arguments"]) for way in learned.values()}) > 1:
            raise LearnError(of("learned_ways", most=1))
        self._ways.update(learned)
        return found

    def _ways_of_call(self, name: str, number: int, block: torch.nn.Module) -> list[Way]:
        made = self._base[name][number]
        runs = [(changed, seen.get(name, [])) for changed, seen in self._runs]
        others = self._other.get(name, [])
        if any(len(calls) != len(self._base[name]) for _, calls in (*runs, ((), others))):
            raise LearnError(of("learned_other_size"))
        way = learn_way(
            [made, *(calls[number] for _, calls in runs)],
            [changed for changed, _ in runs],
            others[number],
            (self._other_dtype, self._twin.dtype),
        )
        mark = self._twin.mark(name)
        key = (digest(way), mark)
        if key not in self._ranges:
            self._ranges[key] = by_ranges(way, block, self._twin, self._listener)
        return self._ranges[key]


def _idle(made: FakeCall) -> list[Any]:
    """Whole numbers of a call that nothing reads, as they were."""
    leaves = [] if made.call is None else made.call.leaves
    return [
        [i, each]
        for i, each in enumerate(leaves)
        if i not in made.known.leaves and not isinstance(each, torch.Tensor)
    ]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
