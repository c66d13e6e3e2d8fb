"""Which nodes of the running prompt correspond to what our nodes attached to its models.

The host's cache serves a node's output to any node of another prompt with the same class, inputs
and ancestors, whatever its id: such nodes are recognised by these.
"""

from __future__ import annotations

from ..backends.engine import AttachedBy
from ..backends.host_api.execution import executing_node, executing_prompt
from .left_out import LeftOut
from .making import Making, alike
from .workflow import placed_before, running, workflow_id


def attached_by(before: AttachedBy | None) -> AttachedBy | None:
    """Return what attached a session in the running prompt.

    Args:
        before: the result for the same session in an earlier run, None while its node runs.

    Returns:
        None if unknown.
    """
    prompt, extra_data = running()
    if before is None:
        node = executing_node()
        if node is None:
            return None
        made_of, nodes = Making(prompt).of(node), [node]
    else:
        made_of, nodes = before.made_of, alike(prompt, before.made_of)
        if not nodes:
            return None
    known: list[str] = []
    placed = [placed_before(extra_data, node) for node in nodes]
    for node, consumers in zip(nodes, placed, strict=True):
        known += consumers or (node,)
    places = tuple(map(page_place, known))
    return AttachedBy(
        made_of,
        workflow_id(extra_data),
        places,
        by_setting=all(placed),
        has_ended=lambda: running()[0] is not prompt,
        is_left_out=LeftOut(made_of, executing_prompt()),
    )


def page_place(node_id: str) -> str:
    """Return a node's place in the prompt as the page writes it: "12:3" for node 3 in the subgraph
    of node 12. Command line clients, which expand subgraphs themselves, write "12/3".
    """
    return node_id.replace("/", ":")
