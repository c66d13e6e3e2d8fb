"""What is foreign about a root module at the moment: code and modules that other nodes replaced.

Asked before each step: a node's wrapper around this very step may have done it, and may undo it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..families.plan import Plan
from ..kinds.watch import Change, Watch
from .kind import Kind
from .wiring import Wiring, patched_places, replaced_function


class Foreign:
    """Watches one root module as it was described."""

    def __init__(
        self, root: torch.nn.Module, plan: Plan, kinds: Sequence[Kind], *, whole_calls: bool
    ) -> None:
        """Remember how things are now.

        Args:
            kinds: each knows the code that was described for it.
            whole_calls: whether the root module's own code counts, too, for its calls are captured.
        """
        self._plan, self._kinds = plan, kinds
        self._wiring = Wiring(root)
        self._watch = Watch()
        for kind in kinds:
            self._watch.include(kind.watch)
        self._replaced = replaced_function(root, self._watch) if whole_calls else None
        self._seen: object = None
        #: Places that are left to the host's code, each with its reason.
        self.places: dict[str, str] = {}
        #: Why no whole call can be known by what it shows, if so.
        self.code: str | None = None

    def is_stale(self) -> bool:
        """Tell whether the model has to be described anew: other modules, settings, code."""
        return self._watch.changed() or self.is_rebuilt() or self._wiring.settings_changed()

    def is_rebuilt(self) -> bool:
        """Tell whether modules were replaced, or their classes."""
        return self._wiring.changed()

    def replaced_code(self) -> list[Change]:
        """Return which functions are others than those that were described."""
        return self._watch.changes() if self._watch.changed() else []

    def look(self) -> None:
        """Find what other nodes do now."""
        changes = self.replaced_code()
        self._seen = self._wiring.marks(), changes
        self.places = dict(patched_places(self._plan))
        if changes:
            for kind in self._kinds:
                if (problem := kind.watch.problem()) is not None:
                    self.places.update((place.name, problem) for place in kind.places)
        self.code = (
            self._wiring.foreign() or self._replaced or (changes[0].words if changes else None)
        )

    def look_again(self) -> bool:
        """Look anew if anything changed since the last time; returns whether it did."""
        if (self._wiring.marks(), self.replaced_code()) == self._seen:
            return False
        self.look()
        return True
