"""The form of a learned block, made from a way; otherwise like those of the written families."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..contract import InputSpec, Symbol
from ..operators import host_attention
from ..plans.binding import TAKEN, Arguments, Beside
from ..plans.plan import Form, RegionCall, first_of
from ..reasons import Reason, of
from .blocks import ReadAttributes, all_read
from .calls import by_position
from .fitting import Fit
from .notes import BARE, LIVE
from .options import ABSENT
from .sizes import PRODUCT, SUM
from .values import classes_of, put_together, take_apart
from .ways import COMPUTE, INT, Way, digest, pieces

#: The family of all forms that were learned.
NAME = "learned"


class Learned(Form):
    """A block as it is called in one way."""

    family = NAME
    beside = True

    def __init__(self, way: Way) -> None:
        """Set up.

        Args:
            way: `ways.learn_way`.
        """
        self.way = way
        self.name = digest(way)
        self.live_attention = way["attends"] in (LIVE, BARE)
        self.arguments = _arguments(way)
        self.writes = tuple(range(len(way["writes"])))
        self._leaves = way["leaves"]
        self._position = {tuple(each): i for i, each in enumerate(way["order"])}
        self._fit = Fit(way)

    @property
    def symbols(self) -> dict[str, Symbol]:
        """Its sizes by name."""
        return {name: Symbol(name, *rest) for name, *rest in self.way["symbols"]}

    def label(self, module: Any) -> str:
        first = self._leaves[self.way["order"][0][0]]
        widths = [dim for dim in first["dims"] if isinstance(dim, int)]
        return f"{type(module).__name__} {widths[-1] if widths else ''}".strip()

    def reads(self, module: Any) -> Callable[[type], Collection[str]]:
        """Layers may read one another's."""
        wanted = all_read(module).union(self.way["reads"]["attributes"])
        return lambda _: wanted

    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:
        found = []
        for i, piece in self.way["order"]:
            leaf = self._leaves[i]
            if leaf["dtype"] == INT:
                found.append(InputSpec(f"n{i}", INT, (leaf["symbol"],)))
                continue
            kind = dtype if leaf["dtype"] == COMPUTE else leaf["dtype"]
            name = f"a{i}_{piece}" if leaf.get("how") == SUM else f"a{i}"
            found.append(InputSpec(name, kind, tuple(pieces(leaf)[piece])))
        return tuple(found)

    def reference(self, module: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Compute the block: the inputs that it writes into, and its results, except those that are
        an argument itself.
        """
        leaves = self._values(inputs)
        reads = self.way["reads"]
        read = {n: value for n, value in reads["options"] if value != ABSENT}
        given = {
            **dict.fromkeys(reads["idle"], 0),
            **read,
            **(host_attention.options() if self.way["attends"] == LIVE else {}),
        }
        forward = type(module).forward
        named = {n: put_together(each, leaves, given) for n, each in self.way["arguments"]}
        args, kwargs = by_position(forward, named)
        returned: list[Any] = []
        take_apart(forward(module, *args, **kwargs), returned)
        own = [r for r, at in zip(returned, self.way["same"], strict=True) if at < 0]
        return (*(inputs[i] for i in self.writes), *own)

    def code(self) -> tuple[Callable[..., Any], ...]:
        """Code by which `reference` treats its inputs, as it is part of a graph, too."""
        return (Learned._values, Learned._check_sizes, *classes_of(self.way["arguments"]))

    def _check_sizes(self, inputs: Sequence[Any]) -> None:
        """Tell a trace that sizes of one name are equal, before code cuts one by another."""
        first: dict[str, Any] = {}
        for (i, piece), value in zip(self.way["order"], inputs, strict=True):
            leaf = self._leaves[i]
            if leaf["dtype"] != INT:
                for dim, size in zip(pieces(leaf)[piece], value.shape, strict=True):
                    if isinstance(dim, str):
                        is_equal = size == first.setdefault(dim, size)
                        torch._check(is_equal)  # type: ignore[no-untyped-call]

    def _values(self, inputs: Sequence[Any]) -> list[Any]:
        """The leaves of a call, from the inputs."""
        self._check_sizes(inputs)
        found: list[Any] = []
        for i, leaf in enumerate(self._leaves):
            first: Any = inputs[self._position[i, 0]] if (i, 0) in self._position else None
            if leaf.get("how") == SUM:
                parts = [inputs[self._position[i, p]] for p in range(len(leaf["of"]))]
                first = torch.cat(parts, leaf["axis"])
            elif leaf.get("how") == PRODUCT:
                axis = leaf["axis"]
                first = first.flatten(axis, axis + len(leaf["of"]) - 1)
            elif leaf["dtype"] == INT and first is None:
                first = leaf.get("value", 0)
            found.append(first)
        for i, leaf in enumerate(self._leaves):
            if "size" in leaf:
                at, axis = leaf["size"]
                found[i] = found[at].shape[axis]
            elif "factor" in leaf:
                at, axis = leaf["factor"]
                found[i] = inputs[self._position[at, 0]].shape[axis]
        return found


def serve(
    forms: Sequence[Learned],
    idle: Sequence[Mapping[int, int]],
    read: ReadAttributes,
    calls: Sequence[RegionCall | None],
    *taken: Any,
) -> Any:
    """Compute a block from what is taken of a call, in the first way that fits; None if the host
    must.

    Args:
        forms: of the ways.
        idle: the place's ignored numbers for each form: they must be equal at each call.
        read: what is read of the block's attributes.
        calls: that run each form; None for forms without a graph, but not for all.
        taken: the arguments, the step's options first where the block takes them.
    """
    # By the model's code, which may do so between two blocks.
    if torch.get_default_dtype() is not torch.float32 or read.have_changed():
        return first_of(calls).decline(of("learned_settings_now"))
    reasons: list[Reason] = []
    for form, numbers, call in zip(forms, idle, calls, strict=True):
        fit = form._fit
        fitted = fit.of_call(taken, numbers)
        if isinstance(fitted, Reason):
            reasons.append(fitted)
            continue
        if call is None:
            reasons.insert(0, of("learned_no_graph"))
            break
        inputs, leaves, options, shape = fitted
        results = call(*inputs, options=options, form=shape)
        if results is None:
            return None
        if isinstance(results, Beside):
            results.parted = partial(fit.parted, leaves=leaves)
            return results
        return fit.unpacked(results, leaves)
    return first_of(calls).decline(reasons[0])


def _arguments(way: Way) -> Arguments:
    """A block's arguments: all are taken, to be compared with the way."""
    names = [name for name, _ in way["arguments"]]
    first = [name for name in names if name.startswith("*")]
    rest = [name for name in names if not name.startswith("*")]
    return Arguments(*first, **dict.fromkeys(rest, TAKEN))
