"""Keep calls of operators that run unknown code in the program's order.

Such code may count calls, draw numbers or write anywhere, unseen by compilers. Each call in a
traced graph gets a number, its turn: so no two are alike, none is dropped as unused, and Inductor's
scheduler sees each as depending on the one before, without memory being held.

Sources: torch/_inductor/{scheduler,dependencies,config}.py, torch/fx/node.py of torch 2.10-2.15.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.fx.node import has_side_effect

#: Inductor's setting for what changes what it is about to schedule.
BEFORE_FUSION = "_pre_fusion_custom_pass"
#: The argument that says which one of such calls it is, from 1 on; 0 outside of graphs.
_TURN = "turn"
_TAKEN = re.compile(rf"\b{_TURN}=(\d+)\)")


def taking(schema: str) -> str:
    """Add a turn to an operator's schema, "name(Tensor input, ...) -> Tensor"."""
    takes, arrow, gives = schema.partition(") -> ")
    return f"{takes}, *, int {_TURN}=0{arrow}{gives}"


def without(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ignores its turn."""

    def called(*args: Any, turn: int = 0) -> Any:
        return run(*args)

    return called


def keep(operator: torch._ops.OpOverload) -> None:
    """Never drop an operator's calls as unused."""
    has_side_effect(operator)


def is_taken_by(function: Any) -> bool:
    """Tell whether a graph node's target is such an operator."""
    return isinstance(function, torch._ops.OpOverload) and any(
        argument.name == _TURN for argument in function._schema.arguments
    )


def give(graph: torch.fx.Graph) -> None:
    """Number the calls of a graph in the program's order."""
    for turn, node in enumerate(_calls(graph), start=1):
        node.kwargs = {**node.kwargs, _TURN: turn}


def are_kept(source: str, graph: torch.fx.Graph) -> bool:
    """Tell whether generated code makes each call of a graph once and in turn."""
    return [int(turn) for turn in _TAKEN.findall(source)] == list(range(1, len(_calls(graph)) + 1))


def chain(nodes: Sequence[Any]) -> Sequence[Any]:
    """Make each call depend on the one before.

    Args:
        nodes: of Inductor's scheduler, before fusion.
    """
    turns = {turn: node for node in nodes if (turn := _turn_of(node.node))}
    if len(turns) < 2:
        return nodes
    from torch._inductor.dependencies import WeakDep

    for (_, before), (_, node) in pairwise(sorted(turns.items())):
        name = before.get_outputs()[0].get_name()
        node.add_fake_dep(WeakDep(name, node.get_name(), is_fake=True))
    scheduler = nodes[0].scheduler
    scheduler.nodes = scheduler.topological_sort_schedule(list(nodes))
    scheduler.compute_ancestors()
    return scheduler.nodes  # type: ignore[no-any-return]


def _calls(graph: torch.fx.Graph) -> list[Any]:
    return [node for node in graph.nodes if is_taken_by(node.target)]


def _turn_of(kernel: Any) -> int:
    """An Inductor node's turn; 0 if it takes none."""
    if not is_taken_by(getattr(kernel, "op_overload", None)):
        return 0
    return int(kernel.kwargs.get(_TURN, 0))
