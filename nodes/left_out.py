"""Whether samplers of later prompts did without a model that one of our nodes gives.

The host's cache serves the node in such prompts, and no code of ours runs.
"""

from __future__ import annotations

from .classes import host_classes
from .making import Making, alike
from .placing import MODEL, find_consumers
from .reading import above
from .workflow import ended, is_plain

#: Of prompts that are looked at, the newest first.
_LOOKED_AT = 20


class LeftOut:
    """Tells it of one node, and keeps the answer until another prompt has ended."""

    def __init__(self, made_of: tuple[str, str], since: str | None) -> None:
        """Set up; nothing is looked at.

        Args:
            made_of: how the node is made, which identifies it in other prompts.
            since: id of the prompt in which its model was attached or ran last; None if unknown.
        """
        self._made_of, self._since = made_of, since
        self._newest = since
        self._answer = False

    def __call__(self) -> bool:
        """Whether, in the newest prompt with this node, no sampler got its model: there is none
        behind it, or each of them made its result after the model ran last.
        """
        if self._since is None or self._made_of[0] not in (MODEL.node, MODEL.instead):
            return False
        for newest in ended(1):
            if newest.id != self._newest:
                self._newest, self._answer = newest.id, self._look()
        return self._answer

    def _look(self) -> bool:
        wanted: set[tuple[str, str]] | None = None
        classes = host_classes()
        for prompt in ended(_LOOKED_AT):
            if prompt.id == self._since:
                break
            if not prompt.is_whole or is_plain(prompt.extra_data):
                continue
            making, needed = Making(prompt.nodes), above(prompt.nodes, prompt.outputs)
            samplers = {place.node for place in find_consumers(prompt.nodes, classes, MODEL)}
            if wanted is None:
                ours = set(alike(prompt.nodes, self._made_of))
                fed = {each for each in samplers if ours & above(prompt.nodes, [each])}
                if not ours or not (fed or samplers) & needed:
                    continue
                wanted = {making.of(each) for each in fed & needed}
            wanted -= {making.of(each) for each in samplers & needed - prompt.cached}
            if not wanted:
                return True
        return False
