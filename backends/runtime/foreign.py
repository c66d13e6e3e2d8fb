"""What others have changed about a root module at the moment: code and modules that they replaced.

Asked before each step: a node's wrapper around this very step may have done it, and may undo it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..code.watch import Change, Watch
from ..plans.plan import Plan
from ..reasons import Reason
from ..torch_api import surroundings
from .kind import Kind
from .wiring import ForeignCode, Others, Wiring, live_modules, others_in, replaced_function


class _State(NamedTuple):
    """What other nodes do at a moment."""

    around: Reason | None
    marks: tuple[list[Any], list[int], list[int]]
    changes: list[Change]
    set_since: Reason | None


class Foreign:
    """Watches one root module as it was described."""

    def __init__(
        self,
        root: torch.nn.Module,
        plan: Plan,
        kinds: Sequence[Kind],
        device: torch.device,
        *,
        whole_calls: bool,
    ) -> None:
        """Remember how things are now.

        Args:
            kinds: each knows the code that was described for it.
            device: where it runs.
            whole_calls: whether the root module's own code counts, too, because its calls are
                captured.
        """
        self._plan, self._kinds, self._device = plan, kinds, device
        self._wiring = Wiring(root)
        self._watch = Watch()
        for kind in kinds:
            self._watch.include(kind.watch)
        self._replaced = replaced_function(root, self._watch) if whole_calls else None
        self._seen: _State | None = None
        #: Places that are left to the host's code, each with its reason.
        self.places: dict[str, Reason] = {}
        #: What others put into parts of places, which graphs call when they run.
        self.guests: dict[str, ForeignCode] = {}
        #: Why no whole call can be known by what it shows, if so.
        self.code: Reason | None = None

    def is_stale(self) -> bool:
        """Tell whether the model must be described again: other modules, attributes, code.

        Not while something changes all maths around it: that is temporary and not the model's.
        """
        if self.around() is not None:
            return False
        self._wiring.attributes.look()
        return self._watch.changed() or self.is_rebuilt() or self._set_since() is not None

    def around(self) -> Reason | None:
        """Say what changes the maths of all calls now, whatever code makes them."""
        return surroundings.foreign(self._device) or surroundings.replaced_methods()

    def is_rebuilt(self) -> bool:
        """Tell whether modules were replaced, or their classes."""
        return self._wiring.changed()

    @property
    def is_led(self) -> bool:
        """Whether other nodes' methods of the root module call its blocks."""
        return self._wiring.has_methods

    def replaced_code(self) -> list[Change]:
        """Return which functions differ from those that were described."""
        return self._watch.changes() if self._watch.changed() else []

    def look(self) -> None:
        """Find what other nodes do now."""
        self._seen = self._state()
        around, marks, changes, set_since = self._seen
        self.places, self.guests = others_in(self._plan) if any(marks) else Others({}, {})
        if changes:
            for kind in self._kinds:
                if (problem := kind.watch.problem()) is not None:
                    self.places.update((place.name, problem) for place in kind.places)
        everywhere = around or set_since
        if everywhere is not None:
            self.places = dict.fromkeys((place.name for place in self._plan.places), everywhere)
        self.code = (
            everywhere
            or self._wiring.foreign()
            or self._replaced
            or (changes[0].words if changes else None)
        )

    def look_again(self) -> bool:
        """Look again if anything changed since the last time; returns whether it did."""
        if self._state() == self._seen:
            return False
        self.look()
        return True

    def _state(self) -> _State:
        marks = self._wiring.marks()
        return _State(self.around(), marks, self.replaced_code(), self._set_since())

    def _set_since(self) -> Reason | None:
        """Say what another node set since the description that a graph depends on. It depends on
        nothing of a part that is called live.
        """
        found = self._wiring.attributes.set_since
        if not found:
            return None
        live = live_modules(self._plan)
        return next((reason for module, reason in found if module not in live), None)
