"""A prompt and its plain form in one, for the second of two compared runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .reading import Prompt, as_link, class_of

#: Of a node's id where the plain prompt has another node; the page knows it, too.
SUFFIX = "-plain"
_PREFIX = "Warmgraph"


def put_beside(
    prompt: Prompt, plain: Prompt, outputs: Sequence[object]
) -> tuple[Prompt, list[str]]:
    """Return what to post for a plain run, and which nodes of it to run.

    The host drops cached outputs, our models included, without a node in the newest prompt, and the
    page shows results on nodes by id. So our nodes stay, though nothing after them runs, and their
    replacements have ids that no page knows.

    Args:
        plain: the prompt's plain form.
        outputs: the output nodes that were run.
    """
    kinds = {node: class_of(plain, node) or "" for node in plain}
    shown = {node for node in outputs if isinstance(node, str) and node in plain}
    others = {
        node
        for node, kind in kinds.items()
        if kind.startswith(_PREFIX) or kind != (class_of(prompt, node) or "") or node in shown
    }

    def renamed(value: Any) -> Any:
        origin = as_link(value)
        return value if origin is None or origin[0] not in others else [name(origin[0]), origin[1]]

    def name(node: str) -> str:
        return node + SUFFIX if node in others else node

    both = dict(prompt)
    for node, entry in plain.items():
        inputs = entry.get("inputs") if isinstance(entry, dict) else None
        if isinstance(inputs, dict):
            entry = {**entry, "inputs": {key: renamed(value) for key, value in inputs.items()}}
        both[name(node)] = entry
    wanted = [node for node in outputs if isinstance(node, str) and node in plain]
    return both, [name(node) for node in wanted if not kinds[node].startswith(_PREFIX)]
