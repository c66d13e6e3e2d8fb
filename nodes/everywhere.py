"""The setting "Compile every model that reaches a sampler": Compile nodes in every posted prompt.

A prompt handler of the host puts them in, so a model is compiled as by a node that a user placed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..backends.sessions.lines import line
from ..backends.sessions.settings import Settings
from .bypassed import Workflow
from .classes import Classes
from .placing import MODEL, VAE, find_places, place_nodes
from .workflow import is_plain, note_placed, posted_workflow

logger = logging.getLogger(__name__)

#: Models that the tab names, of those that were left alone.
_NAMED = 20


class Everywhere:
    """Applies the setting to posted prompts, and remembers what it did with the last one."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        classes: Callable[[], Classes],
        on_change: Callable[[], None],
    ) -> None:
        """Set up; no prompt was posted yet.

        Args:
            settings: those of this server.
            classes: those of this server.
            on_change: called when the list of models left alone changes.
        """
        self._settings = settings
        self._classes = classes
        self._on_change = on_change
        self._left: list[dict[str, Any]] = []

    def take(self, json_data: dict[str, Any]) -> dict[str, Any]:
        """Return a posted prompt with Compile nodes where the settings want them.

        In a prompt for a comparison they compile nothing and time the models' steps. A failure of
        ours leaves a prompt unchanged and is logged.
        """
        settings = self._settings()
        if not settings.compiles_all:
            return json_data
        try:
            return self._put_nodes(json_data, vaes=settings.compiles_all_vaes)
        except Exception as error:  # nothing may fail a prompt that the host would have run
            logger.exception("A prompt gets no Compile nodes by the setting: %s", error)
            self._say([{"line": line("left_alone_failed", error=error).to_plain()}])
            return json_data

    def plain(self) -> dict[str, Any]:
        """Return what pages show, as JSON-plain data."""
        on = self._settings().compiles_all
        return {"everywhere": {"on": on, "left": self._left if on else []}}

    def _put_nodes(self, json_data: dict[str, Any], *, vaes: bool) -> dict[str, Any]:
        prompt, extra_data = json_data.get("prompt"), json_data.get("extra_data", {})
        if not isinstance(prompt, dict) or not isinstance(extra_data, dict):
            return json_data  # for the host to refuse
        workflow = Workflow(posted_workflow(extra_data))
        plain = is_plain(extra_data)
        kinds = (MODEL, VAE) if vaes and not plain else (MODEL,)
        found = find_places(prompt, self._classes(), kinds, workflow.is_bypassed)
        widgets = {"backend": "eager"} if plain else {}
        placed, before = place_nodes(prompt, found.places, **widgets)
        left = [left.plain() for left in found.left if left.line.key != "left_alone_ours"]
        if not plain:  # a prompt for a comparison has no news
            self._say(left)
        return {**json_data, "prompt": placed, "extra_data": note_placed(extra_data, before)}

    def _say(self, left: list[dict[str, Any]]) -> None:
        """Keep what was left alone in the last prompt, and notify pages if it changed."""
        for each in left:
            if each not in self._left:
                logger.info("Warmgraph leaves %s as it is: %s", _name(each), each["line"]["text"])
        changed, self._left = self._left != left[:_NAMED], left[:_NAMED]
        if changed:
            self._on_change()


def _name(left: dict[str, Any]) -> str:
    return f"the model of {left['class']} ({left['node']})" if "node" in left else "a prompt"
