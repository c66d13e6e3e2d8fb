"""A way in which a block is called, as JSON-plain data: all that a worker needs to make its graph,
and all that a later call must equal except its sizes. It contains no place, size or checkpoint, so
equal ways are equal texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..errors import LearnError
from ..reasons import of
from ..storing.canonical_json import canonical_json, sha256_hex
from .arguments import Variable
from .sizes import PRODUCT, SUM, Sizes
from .steps import FakeCall
from .values import leaf_names

#: The dtype that the model computes in, whatever that is.
COMPUTE = "compute"
#: Of a whole number.
INT = "int"

Way = dict[str, Any]
Leaf = dict[str, Any]


def digest(way: Way) -> str:
    """Return the name of a way."""
    return sha256_hex(canonical_json(way))[:16]


def learn_way(
    calls: Sequence[FakeCall],
    runs: Sequence[Sequence[Variable]],
    other: FakeCall,
    dtypes: tuple[str, str],
) -> Way:
    """Learn a way from one call.

    Args:
        calls: the watched one, and the same at other sizes.
        runs: the variables that were changed in each but the first.
        other: the call in another dtype.
        dtypes: maps that dtype and the first one to each other.

    Raises:
        LearnError: no graph could replace it.
    """
    base = calls[0]
    for call in (*calls, other):
        if _alike(call) != _alike(base):
            raise LearnError(of("learned_other_size"))
    assert base.call is not None
    facts = base.call.facts
    sizes = Sizes(runs)
    leaves = _leaves(calls, other, sizes, dtypes)
    _rename(leaves, sizes)
    sizes.find_parts()
    _take_parts(leaves, sizes, base.writes)
    carriers = _carriers(leaves)
    _find_numbers(leaves, carriers)
    order = _order(leaves, base.writes, sizes)
    same = facts["same"]
    if not base.writes and all(at >= 0 for at in same):
        raise LearnError(of("learned_nothing"))
    named = sorted({name for leaf in leaves for name in used(leaf)})
    return {
        "arguments": facts["arguments"],
        "leaves": leaves,
        "results": facts["results"],
        "same": same,
        "writes": base.writes,
        "attends": base.attends,
        "reads": base.reads.facts(base.known.options, base.known.attributes),
        "symbols": [_symbol(sizes, name) for name in named],
        "carriers": [[name, *carriers[name]] for name in named if name in carriers],
        "order": order,
    }


def _alike(call: FakeCall) -> Any:
    """What does not depend on sizes."""
    assert call.call is not None
    facts = call.call.facts
    kept = [facts[name] for name in ("arguments", "results", "same")]
    ranks = [len(each[1]) if isinstance(each, list) else -1 for each in facts["leaves"]]
    return kept, ranks, call.writes, call.attends


def _leaves(
    calls: Sequence[FakeCall], other: FakeCall, sizes: Sizes, dtypes: tuple[str, str]
) -> list[Leaf]:
    assert other.call is not None
    base, there = calls[0], other.call.facts["leaves"]
    every = [call.call.facts["leaves"] for call in calls if call.call is not None]
    names = leaf_names(base.call.facts["arguments"])  # type: ignore[union-attr]
    found: list[Leaf] = []
    for i, leaf in enumerate(every[0]):
        values = [each[i] for each in every]
        if not isinstance(leaf, list):
            found.append({"in": names[i], "dtype": INT, **_number(i, values, calls, sizes)})
            continue
        if len({dtype for dtype, _ in values}) > 1:
            raise LearnError(of("learned_other_size"))
        shapes = zip(*(shape for _, shape in values), strict=True)
        dtype = COMPUTE if (there[i][0], leaf[0]) == dtypes else leaf[0]
        if dtype != COMPUTE and there[i][0] != leaf[0]:
            raise LearnError(of("learned_other_size"))
        found.append({"in": names[i], "dtype": dtype, "dims": [sizes.named(s) for s in shapes]})
    return found


def _number(i: int, values: Sequence[int], calls: Sequence[FakeCall], sizes: Sizes) -> Leaf:
    if i not in calls[0].known.leaves:
        return {"idle": True}
    name = sizes.named(tuple(values))
    return {"symbol": name} if isinstance(name, str) else {"value": name}


def _rename(leaves: Sequence[Leaf], sizes: Sizes) -> None:
    """Give the only length the name of any length."""
    only = sizes.only_length()
    if only is None or only == "tokens":
        return
    sizes.rename(only, "tokens")
    for leaf in leaves:
        if leaf.get("symbol") == only:
            leaf["symbol"] = "tokens"
        if "dims" in leaf:
            leaf["dims"] = ["tokens" if dim == only else dim for dim in leaf["dims"]]


def _take_parts(leaves: Sequence[Leaf], sizes: Sizes, writes: Sequence[int]) -> None:
    """Split tensors of a composed size into parts."""
    for i, leaf in enumerate(leaves):
        axes = [axis for axis, dim in enumerate(leaf.get("dims", ())) if dim in sizes.parts]
        if len(axes) == 1 and i not in writes:
            [axis] = axes
            leaf.update(axis=axis, **sizes.parts[leaf["dims"][axis]]._asdict())


def pieces(leaf: Leaf) -> list[list[Any]]:
    """Return the sizes of each input that a tensor is split into."""
    dims, axis = leaf["dims"], leaf.get("axis")
    if axis is None:
        return [dims]
    before, after = dims[:axis], dims[axis + 1 :]
    if leaf["how"] == PRODUCT:
        return [[*before, *leaf["of"], *after]]
    return [[*before, part, *after] for part in leaf["of"]]


def used(leaf: Leaf) -> set[str]:
    """Return the names of the sizes that inputs have of a leaf."""
    if leaf["dtype"] == INT:
        return {leaf["symbol"]} if "symbol" in leaf else set()
    return {dim for piece in pieces(leaf) for dim in piece if isinstance(dim, str)}


def _carriers(leaves: Sequence[Leaf]) -> dict[str, tuple[int, int]]:
    """The sources of a size: a leaf and its axis, -1 for a number."""
    found: dict[str, tuple[int, int]] = {}
    for i, leaf in enumerate(leaves):
        for axis, dim in enumerate(leaf.get("dims", ())):
            if isinstance(dim, str) and axis != leaf.get("axis"):
                found.setdefault(dim, (i, axis))
    return found


def _find_numbers(leaves: Sequence[Leaf], carriers: dict[str, tuple[int, int]]) -> None:
    """Read a number that is a tensor's size, or a factor of one, from that tensor."""
    for i, leaf in enumerate(leaves):
        name = leaf.get("symbol")
        if name is None:
            continue
        if name in carriers and carriers[name][1] >= 0:
            leaf["size"] = list(carriers[name])
            del leaf["symbol"]
            continue
        for at, other in enumerate(leaves):
            if other.get("how") == PRODUCT and name in other["of"]:
                carriers.setdefault(name, (i, -1))
                leaf["factor"] = [at, other["axis"] + other["of"].index(name)]
                del leaf["symbol"]
                break


def _order(leaves: Sequence[Leaf], writes: Sequence[int], sizes: Sizes) -> list[list[int]]:
    """The inputs, (leaf, piece) of each: those that are written into first, then the largest."""

    def elements(leaf: Leaf, piece: int) -> float:
        if leaf["dtype"] == INT:
            return -1.0
        dims = pieces(leaf)[piece]
        return prod(sizes.symbol(d).example if isinstance(d, str) else d for d in dims)

    found = []
    for i, leaf in enumerate(leaves):
        if leaf["dtype"] == INT and "symbol" not in leaf:
            continue
        count = len(leaf["of"]) if leaf.get("how") == SUM else 1
        found += [(i not in writes, -elements(leaf, piece), i, piece) for piece in range(count)]
    if not found or leaves[min(found)[2]]["dtype"] == INT:
        raise LearnError(of("learned_nothing"))
    return [[i, piece] for *_, i, piece in sorted(found)]


def _symbol(sizes: Sizes, name: str) -> list[Any]:
    symbol = sizes.symbol(name)
    return [name, symbol.minimum, symbol.maximum, symbol.example]
