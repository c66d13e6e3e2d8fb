"""One call of a place in CUDA graphs: captured once, repeated from then on.

Code in it that no CUDA graph may hold cuts it in two: that code runs between two graphs at each
repetition, on copies, because it may keep its arguments.

Tensors between two graphs of a piece are read right after the first one ran, before anything else
runs; so nobody owns them (`memory.borrowed`), and all pieces share one pool.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..device import gpu
from ..operators.call_context import using
from ..reasons import Reason
from ..torch_api.memory import borrowed, extent_bytes
from .captured_call import THREAD, capturing, forget_frames, undisturbed

#: In bytes, of tensors side by side: any kernel reads at such an address.
_ALIGNMENT = 256
#: A place's graph, as its compiler made it.
GraphCall = Callable[[list[Any]], Any]


class Statics:
    """Tensors at fixed addresses, which all pieces of a root module share: pieces run one after
    another, and do not need them afterwards. They are freed with the last piece that uses them.
    """

    def __init__(self) -> None:
        self._tensors: weakref.WeakValueDictionary[Hashable, torch.Tensor]
        self._tensors = weakref.WeakValueDictionary()
        #: By device and size.
        self._rooms: weakref.WeakValueDictionary[Hashable, torch.Tensor]
        self._rooms = weakref.WeakValueDictionary()

    def take_of(self, use: Hashable, form: Any) -> torch.Tensor:
        """Return the tensor of a form for a use; make it if needed."""
        found = self._tensors.get((use, form))
        if found is None:
            shape, stride, dtype, device = form
            with torch.inference_mode(False):  # else it could be written in inference mode only
                found = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            self._tensors[use, form] = found
        return found

    def side_by_side(
        self, likes: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return tensors of such forms, adjacent in memory that all callers share, as long as it is
        large enough; and that memory, to be kept as long as the tensors.
        """
        starts, size = [], 0
        for like in likes:
            starts.append(size)
            size += -(-extent_bytes(like) // _ALIGNMENT) * _ALIGNMENT
        device = likes[0].device if likes else torch.device("cpu")
        rooms = self._rooms.values()
        room = next((r for r in rooms if r.nbytes >= size and r.device == device), None)
        with torch.inference_mode(False):
            if room is None:
                room = torch.empty(size, dtype=torch.uint8, device=device)
                self._rooms[device, size] = room
            return room, [
                room[start : start + extent_bytes(like)]
                .view(like.dtype)
                .as_strided(like.shape, like.stride())
                for start, like in zip(starts, likes, strict=True)
            ]

    @property
    def held_bytes(self) -> int:
        """What they hold of the device's memory."""
        return sum(each.nbytes for each in (*self._tensors.values(), *self._rooms.values()))


class _Apart(NamedTuple):
    """Code that runs between two graphs.

    Attributes:
        run: the operator that calls it.
        args: its arguments; tensors are borrowed from the graph before.
        results: where the next graph reads its results.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    results: list[torch.Tensor]


class Piece:
    """A captured call of one place."""

    def __init__(
        self, stream: Any, pool: Any, statics: Statics, make_graph: Callable[[], Any], weights: Any
    ) -> None:
        """Set up; nothing is captured yet.

        Args:
            stream: what is captured on.
            pool: where its graphs have their memory (`CardMemory.pool`).
            statics: where it finds its inputs and leaves its results.
            make_graph: makes an empty CUDA graph.
            weights: what it reads (`piece_weights.Weights`), as long as it can be replayed.
        """
        self.device: torch.device = stream.device
        self.weights = weights
        #: Why it is cut, by reason.
        self.cuts: Counter[Reason] = Counter()
        #: What is its own of the GPU's memory; the rest is shared.
        self.own_bytes = 0
        self._stream, self._pool, self._statics = stream, pool, statics
        self._make_graph = make_graph
        self._steps: list[Any] = []  # graphs, and what stands between them
        self._graph: Any = None  # while it is captured
        self._inputs: list[torch.Tensor] = []
        #: What the last call gave, until the next one of any piece.
        self.results: list[torch.Tensor] = []

    # --- capturing --------------------------------------------------------------------------------

    def capture(
        self,
        call: GraphCall,
        weights: Sequence[Any],
        inputs: Sequence[Any],
        live: Mapping[str, Any],
        results: Sequence[Any] = (),
    ) -> None:
        """Capture a call, and compute it (`results`).

        Args:
            call: is called with the weights, where they lie, and the inputs.
            live: what the call passes to its attention (`live_arguments`).
            results: the forms of such a call's results. They lie in memory that outlives the graph
                and is shared with other pieces, so it is allocated before the graph begins.

        Raises:
            Whatever the call raises, or CUDA if it cannot be captured.
        """
        tensors, given = self._taken("input", inputs)
        more, named = self._taken("live", list(live.values()))
        self._inputs = [*tensors, *more]
        ready = self._left_in(results)
        self._fill(tensors_of(inputs, live.values()))
        current = gpu.current_stream(self.device)
        self._stream.wait_stream(current)
        with (
            gpu.on_stream(self._stream),
            undisturbed(self.device),
            using(recorder=self, arguments=dict(zip(live, named, strict=True))),
        ):
            self._begin()
            try:
                with capturing():
                    self._record(call, [*weights, *given])
            except BaseException as error:
                forget_frames(error)
                self._break_off()
                raise
            self._end()
        del ready  # those that were not given after all
        current.wait_stream(self._stream)

    def _taken(self, use: str, values: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
        """The statics of tensors among values, and the values with statics in their place."""
        given = [
            self._statics.take_of((use, n), form_of(value))
            if isinstance(value, torch.Tensor)
            else value
            for n, value in enumerate(values)
        ]
        return tensors_of(given), given

    def _record(self, call: GraphCall, arguments: list[Any]) -> None:
        """Run the call; every tensor that it makes is gone when this returns."""
        results = call(arguments)
        self.results = self._left_in(map(form_of, results))
        for static, result in zip(self.results, results, strict=True):
            leave(static, result)

    def _left_in(self, forms: Iterable[Any]) -> list[torch.Tensor]:
        """Where results of these forms are written: over inputs of the same forms, which are read
        by then because a graph's results are separate; the rest into their own statics.
        """
        free = list(self._inputs)
        left = []
        for n, form in enumerate(forms):
            at = next((at for at, each in enumerate(free) if form_of(each) == form), None)
            left.append(self._statics.take_of(("result", n), form) if at is None else free.pop(at))
        return left

    def stand_apart(
        self, run: Callable[..., Any], fake: Callable[..., Any], args: Any, why: Reason
    ) -> Any:
        """See `call_context.Recorder`."""
        self._end()
        number = sum(isinstance(step, _Apart) for step in self._steps)
        lent = tuple(_over(borrowed, arg) for arg in args)
        with capturing(False):
            given = run(*_copied(lent))
        statics = [
            self._statics.take_of(("apart", number, n), form_of(result))
            for n, result in enumerate(_each(given))
        ]
        _copy(statics, given)
        self._steps.append(_Apart(run, lent, statics))
        self.cuts[why] += 1
        self._begin()
        return statics if isinstance(given, list) else statics[0]

    def _begin(self) -> None:
        self._graph = self._make_graph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode=THREAD)

    def _end(self) -> None:
        """End a graph and run it: what comes next reads what it gives."""
        graph, self._graph = self._graph, None
        graph.capture_end()
        self._steps.append(graph)
        graph.replay()

    def _break_off(self) -> None:
        if self._graph is not None:
            graph, self._graph = self._graph, None
            with contextlib.suppress(RuntimeError):  # says only that it was broken off
                graph.capture_end()
            self._steps.append(graph)  # freed like the others

    # --- repeating --------------------------------------------------------------------------------

    def replay(self, inputs: Sequence[Any], live: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Compute on other values of the same forms; the results are the caller's own."""
        self._fill(tensors_of(inputs, live.values()))
        for step in self._steps:
            if isinstance(step, _Apart):
                _copy(step.results, step.run(*_copied(step.args)))
            else:
                step.replay()
        return self.given()

    def _fill(self, tensors: Sequence[torch.Tensor]) -> None:
        for static, tensor in zip(self._inputs, tensors, strict=True):
            static.copy_(tensor)

    def given(self) -> tuple[torch.Tensor, ...]:
        """Copies of the results, the caller's own."""
        return tuple(static.clone() for static in self.results)

    def free(self) -> list[Any]:
        """Give its memory back; it cannot be replayed any more."""
        gpu.synchronize(self.device)  # it may still run
        steps, self._steps = self._steps, []
        self._inputs, self.results, self.weights = [], [], None
        return [step for step in steps if not isinstance(step, _Apart)]


def leave(static: torch.Tensor, result: torch.Tensor) -> None:
    """Write a result where it is read after the graph: the graph's last operation."""
    static.copy_(result)


def form_of(value: Any) -> Any:
    """The properties of a tensor on which captured kernels depend; of anything else, its class."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return type(value)


def tensors_of(*values: Any) -> list[torch.Tensor]:
    """The tensors among these, in their order."""
    return [one for some in values for one in some if isinstance(one, torch.Tensor)]


def _each(given: Any) -> list[torch.Tensor]:
    """An operator's result: one tensor, or several."""
    return given if isinstance(given, list) else [given]


def _copy(statics: Sequence[torch.Tensor], given: Any) -> None:
    for static, result in zip(statics, _each(given), strict=True):
        static.copy_(result)


def _over(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Change a tensor, or those of a list."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return [_over(change, each) for each in value] if isinstance(value, list) else value


def _copied(args: Iterable[Any]) -> list[Any]:
    return [_over(torch.clone, arg) for arg in args]
