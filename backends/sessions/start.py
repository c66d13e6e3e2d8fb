"""How a session starts: plan, backend and captured calls, as its device, its model and its user's
choice allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..attaching.attached import Attached, LeftAlone
from ..building.pacing import slows_steps
from ..compilers.registry import resolve_backend
from ..contract import CallForm, WhenMissing
from ..cuda_graphs.pieces import Pieces
from ..cuda_graphs.replays import Replays
from ..device.gpu import is_gpu, kind_of
from ..errors import RequirementError
from ..families.catalogue import may_be_captured, may_be_learned, may_be_swapped
from ..host_api.needs import Feature
from ..host_api.present import why_off
from ..plans.plan import Plan
from ..reasons import Reason, joined, of, with_remedy
from ..runtime.learner import Learner
from ..runtime.pace import Pace
from ..runtime.planner import Planner
from ..runtime.scope import Scope
from ..runtime.session import Session, SessionOptions, Whose
from ..runtime.shared import Shared
from .eager_times import EagerTimes
from .settings import Settings


class Starter:
    """Makes the sessions of one server process."""

    def __init__(
        self,
        shared: Shared,
        settings: Settings,
        eager_times: EagerTimes,
        is_building: Callable[[], bool],
        attached_by: Whose,
    ) -> None:
        """Set up; no session is made yet.

        Args:
            shared: what all sessions of the process use.
            settings: the settings in force.
            eager_times: the times of the host's own steps.
            is_building: whether a graph is being built now.
            attached_by: tells which nodes a session belongs to.
        """
        self._attached_by = attached_by
        self._shared = shared
        self._is_building = is_building
        self._settings = settings
        self._eager_times = eager_times

    def start(
        self, attached: Attached, options: SessionOptions, choice: str, *, identifier: str
    ) -> Session:
        """Make the session of a host object; nothing is described yet.

        Args:
            choice: the backend's name, or "auto".

        Raises:
            RequirementError: it must run as without us; the text says why.
        """
        if isinstance(attached, LeftAlone):
            raise RequirementError(attached.why)
        replays = self._replays(attached)
        notes: Sequence[Reason] = ()
        planner = Planner(attached.plan)
        try:
            if options.form is CallForm.EXACT:
                asked = self._shared.debugging
                told = of("identical")
                if not replays and asked.captures:
                    told = of("at_normal_speed", why=joined([told, of("identical_needs")]))
                raise RequirementError(told if replays else with_remedy(told, asked.words))
            plan = attached.plan(attached.root)
            if isinstance(plan, Reason):
                learner = self._learner(attached, options)
                if learner is not None:
                    planner = learner
                elif attached.root is None or not may_be_swapped(attached.root):
                    raise RequirementError(plan)
                plan = Plan(outside=[("the model", plan)])  # it is cut again when a run begins
            device = attached.placement().device
            resolution = resolve_backend(choice, device.type)
            notes = resolution.refused
            if resolution.backend.name == "eager":
                raise RequirementError(joined(notes) if notes else of("compiler_off"))
        except RequirementError as error:
            if choice == "eager" and attached.scale is not None:
                replays, notes = None, [error.told]  # its steps are timed, to compare with
            elif replays is None or choice == "eager":
                raise
            else:
                notes = [of("replayed_as_is", why=error.told)]
            planner, plan = Planner(lambda _: Plan()), Plan()
            resolution = resolve_backend("eager", attached.placement().device.type)
        assert attached.root is not None
        scope = Scope(
            attached.root,
            attached.holder,
            planner,
            plan,
            resolution.backend,
            self._shared,
            replays,
            self._pieces(attached),
        )
        notes = [*notes, self._shared.debugging.words, *self._lacks(attached)]
        return Session(
            identifier,
            attached.name,
            resolution.backend,
            options,
            scope,
            Pace(self._eager_times.of(attached), attached.scale, self._disturbing(attached)),
            filter(None, notes),
            self._attached_by,
        )

    def _learner(self, attached: Attached, options: SessionOptions) -> Learner | None:
        """What learns how a model that no family describes calls its blocks, if allowed."""
        root, lessons, settings = attached.root, self._shared.lessons, self._settings
        if root is None or lessons is None or attached.sort != "model":
            return None
        if not settings.learns_models or not may_be_learned(root):
            return None
        asks = options.when_missing is not WhenMissing.NEVER
        return Learner(root, attached.holder, lessons, lambda: settings.learns_models, may_ask=asks)

    def _disturbing(self, attached: Attached) -> Callable[[], bool]:
        """Return a function that tells whether builds slow the steps of an object now."""
        device, is_building = attached.placement().device.type, self._is_building
        return lambda: is_building() and slows_steps(device)

    def _lacks(self, attached: Attached) -> list[Reason]:
        """What a session lacks with this version of the host."""
        wanted = [Feature.WORKFLOWS]
        if is_gpu(attached.placement().device):
            wanted += [Feature.CAPTURED_CALLS, Feature.WEIGHTS_TOGETHER, Feature.WEIGHTS_AHEAD]
        reasons = (why_off(self._shared.off, feature) for feature in wanted)
        return [reason for reason in reasons if reason is not None]

    def _may_capture(self, attached: Attached) -> bool:
        """Whether anything of a host object may be captured."""
        if attached.sort == "vae" or attached.root is None:
            return False
        if Feature.CAPTURED_CALLS in self._shared.off:
            return False
        if not self._shared.debugging.captures or not self._settings.captured_vram_share:
            return False
        device = attached.placement().device
        return kind_of(device).has_cuda_graphs

    def _replays(self, attached: Attached) -> Replays | None:
        """What captures the whole calls of a host object, if possible."""
        root = attached.root
        if root is None or not self._may_capture(attached) or not may_be_captured(root):
            return None
        return Replays(self._shared.captured, lambda: self._settings.captured_limit_s)

    def _pieces(self, attached: Attached) -> Pieces | None:
        """What captures its places one by one, where that can be."""
        if not self._may_capture(attached):
            return None
        return Pieces(self._shared.captured)
