"""What other nodes put into a call of the UNet, as far as a kept feature depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..host_api.options import ATTENTION, PATCHES, REPLACEMENTS

_PATCHES = (PATCHES, REPLACEMENTS)
_CALLABLES = (ATTENTION,)
_HOOKS = "hooks"


class Patch(NamedTuple):
    """All that was put at one place.

    Functions and objects equal themselves, and bound methods equal other bindings of the same
    method. One that is made for each call equals none, so such calls are all full.
    """

    kind: str
    place: Any
    items: list[Any]

    @property
    def name(self) -> tuple[Any, ...]:
        """The same by the names of what was put there."""
        if self.kind == _HOOKS:  # weights: no other code runs
            return (self.kind,)
        return (self.kind, self.place, [_name(item) for item in self.items])


def patches_of(options: Mapping[str, Any], hooks: Any) -> list[Patch]:
    """List what other nodes put into a call, by kind and place, to be compared by `==`.

    Args:
        options: the call's `transformer_options`.
        hooks: the host's HookGroup that acts on the model's weights now, or None.
    """
    found = []
    for name in _PATCHES:
        for place, given in (options.get(name) or {}).items():
            items = list(given.items()) if isinstance(given, Mapping) else list(given)
            found.append(Patch(name, place, items))
    found += [Patch(name, None, [options[name]]) for name in _CALLABLES if name in options]
    if hooks is not None:
        strengths = [(hook.hook_ref, hook.strength) for hook in hooks.hooks]
        found.append(Patch(_HOOKS, None, strengths))
    return found


def _name(item: Any) -> Any:
    if isinstance(item, tuple):
        return [_name(part) for part in item]
    return getattr(item, "__qualname__", None) or type(item).__qualname__
