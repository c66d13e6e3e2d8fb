"""The graphs that a kind may have beside its first one, for calls that the first one does not
accept.

A call that needs one is left to the host and noted with its model; that model asks for the graph
when its run ends. Other models of the process, which share the first graph, do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..contract import InputSpec, RegionSpec
from ..device.gpu import is_gpu
from ..operators import host_layer
from ..plans.plan import Place
from ..reasons import Reason, of
from .lookahead import Lookahead
from .verdicts import Verdicts

#: Why blocks were left to the host that the step that was watched did not call.
NOT_CALLED = of("learned_not_called")


@dataclass(frozen=True, eq=False)
class Specialization:
    """A way in which another graph of a kind differs from its first one.

    Attributes:
        name: in reports, and where needs are noted.
        words: appended to the kind's label.
        change: makes its description from that of the first graph.
        foreseen: whether to build it for a place on a device type before any call needs it.
    """

    name: str
    words: str
    change: Callable[[RegionSpec], RegionSpec]
    foreseen: Callable[[Place, str], bool] = lambda place, device: False

    def of(self, first: RegionSpec) -> RegionSpec:
        """Return the description of such a graph."""
        return replace(self.change(first), label=f"{first.label} ({self.words})")


def _widened(first: RegionSpec) -> RegionSpec:
    return replace(first, wide=True)


def _unrounded(first: RegionSpec) -> RegionSpec:
    return replace(first, module=host_layer.unrounded(first.module))


def _rowed(first: RegionSpec) -> RegionSpec:
    """Turn a table that all rows share into one for each row."""
    rows = first.inputs[0].dims[0]

    def of_each(spec: InputSpec) -> InputSpec:
        is_shared = len(spec.dims) > 1 and spec.dims[0] == 1
        return replace(spec, dims=(rows, *spec.dims[1:])) if is_shared else spec

    return replace(first, inputs=tuple(map(of_each, first.inputs)))


#: Counts elements with 64 bits: for calls of 2**31 of them and more.
WIDE = Specialization(
    "wide", "64-bit", _widened, lambda place, device: place.widens and is_gpu(device)
)
#: Rounds no layer's input: for calls in which a layer of the host's would not.
UNROUNDED = Specialization("unrounded", "not rounded", _unrounded)
#: Has a rotation table for each image: for calls by others' code that makes those.
ROWED = Specialization("rowed", "a table for each image", _rowed)
#: All of them, in the order in which they are tried.
SPECIALIZATIONS = (WIDE, UNROUNDED, ROWED)

#: Calls the parts that a call brings itself (`Form.given`): such a graph is of another kind, with
#: specializations of its own (`Kind.given`).
GIVEN = "given"

#: What the calls of a model need: (key of a kind's first graph, name of a specialization or GIVEN).
Needs = set[tuple[str, str]]


class GuardFailure(NamedTuple):
    """Why a graph does not accept a call.

    Attributes:
        reason: in words.
        needs: the specialization that would accept it; None if none does.
    """

    reason: Reason
    needs: Specialization | None = None


@dataclass
class CallStats:
    """What the regions of one root module note of their calls.

    Attributes:
        needs: what calls needed; kept by the model.
        verdicts: which graphs may be used with its weights; kept likewise.
        compared: comparisons, but for those of written forms that told nothing.
        calls: how many calls graphs have served.
        lookahead: how far they are ahead of the GPU.
        declined: why calls were left to the host in the last step, the newest by the reason's key.
        structure: stands for the structure of the call, for a learned model.
        beside: calls that the host made to compare graphs.
    """

    needs: Needs = field(default_factory=set)
    verdicts: Verdicts = field(default_factory=Verdicts)
    compared: int = 0
    calls: int = 0
    lookahead: Lookahead = field(default_factory=Lookahead)
    declined: dict[str, Reason] = field(default_factory=dict)
    structure: object = None
    beside: int = 0
