"""The types of the host's node classes' inputs and outputs, by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import nodes  # the host's

logger = logging.getLogger(__name__)

#: Types that stand for any other: switches, reroutes.
_WILD = {"*", "COMFY_MATCHTYPE_V3"}


class Classes:
    """Inspects node classes; one that raises counts as unknown."""

    def __init__(self, mappings: Mapping[str, Any]) -> None:
        """Set up; no class is inspected yet.

        Args:
            mappings: the host's NODE_CLASS_MAPPINGS.
        """
        self._mappings = mappings
        self._gives: dict[str, tuple[str, ...] | None] = {}
        self._takes: dict[str, dict[str, str]] = {}

    def gives(self, name: str) -> tuple[str, ...] | None:
        """Return the types of a class's outputs, None for an unknown class."""
        if name not in self._gives:
            self._gives[name] = self._ask(name, _outputs)
        return self._gives[name]

    def takes(self, name: str, input_name: str) -> str | None:
        """Return the type of a class's input, None if it does not list it.

        Classes list folders for this, so it is called only where it matters.
        """
        return self._listed(name).get(input_name)

    def inputs(self, name: str) -> list[str]:
        """Return the names of the inputs that a class lists, in its order."""
        return list(self._listed(name))

    def _listed(self, name: str) -> dict[str, str]:
        if name not in self._takes:
            self._takes[name] = self._ask(name, _inputs) or {}
        return self._takes[name]

    def _ask(self, name: str, question: Any) -> Any:
        found = self._mappings.get(name)
        if found is None:
            return None
        try:
            return question(found)
        except (
            Exception
        ) as error:  # another pack's code; the host runs into it as well, and reports it
            logger.debug("Node class %s could not be asked: %s", name, error)
            return None


def host_classes() -> Classes:
    """Return the classes of the host, as they are now."""
    return Classes(nodes.NODE_CLASS_MAPPINGS)


def types_in(given: str) -> set[str]:
    """Return the types that an input or output may be of."""
    return {each.strip() for each in given.split(",")}


def may_be(given: str, wanted: str) -> bool:
    """Whether an output of this type may be of the wanted one."""
    types = types_in(given)
    return wanted in types or not types.isdisjoint(_WILD)


def _outputs(found: Any) -> tuple[str, ...]:
    return tuple(map(_plain, found.RETURN_TYPES or ()))


def _inputs(found: Any) -> dict[str, str]:
    listed = found.INPUT_TYPES()
    return {
        name: _plain(described[0])
        for group in ("required", "optional")
        for name, described in (listed.get(group) or {}).items()
    }


def _plain(given: Any) -> str:
    """A type's plain text: packs use strings that equal any other, and lists of choices."""
    return "".join(given) if isinstance(given, str) else "COMBO"
