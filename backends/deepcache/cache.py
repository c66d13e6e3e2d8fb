"""DeepCache on one MODEL: what happens around a sampler run and around each call of the UNet.

The feature of a call is reused by calls that are like it in everything that shapes it
(`features.Place`); whatever is not, runs as a full one. Only counts outlive the run.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from textwrap import shorten
from typing import Any, TypeVar

import torch

from ..code.packs import owner_of
from ..events import Event, Events
from ..host_api import models
from ..host_api import patcher as host
from ..host_api.execution import is_interrupt
from ..host_api.options import EASY_CACHE, SEVERAL_CARDS
from ..host_api.unets import ARGUMENTS, is_own_forward
from ..reasons import Reason, of
from .branches import Branch
from .calls import Before, Step, alone, random_state, within
from .features import Features, shape_of
from .guard import OwnError
from .patches import patches_of
from .run import Options, Run
from .shares import shares, usual_side
from .tally import FULL, SHALLOW, Tally

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How far two ways through compiled graphs may lie apart, in half precision.
_COMPILED_REL_L2 = 1e-2


class DeepCache:
    """Keeps deep features of one UNet within each sampler run."""

    def __init__(
        self,
        branch: Branch,
        options: Options,
        events: Events,
        *,
        identifier: str,
        is_known: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        """Set up for one clone of a model.

        Args:
            branch: the host's UNetModel as cut in two; its blocks are used and never changed.
            options: what the user chose.
            events: is told of the end of each run.
            identifier: its name in reports.
            is_known: which wrappers of a UNet's call know its copies.
        """
        unet: Any = branch.whole.of
        self.options = options
        self.id = identifier
        self._events = events
        self._is_known = is_known
        self.branch = branch
        #: What part of a step's arithmetic a shallow one is, by branch, for images of this side.
        self.costs, self.side = shares(unet), usual_side(unet)
        #: Evaluations so far, by sort: "full", "shallow".
        self.evaluations: Counter[str] = Counter()
        #: What the last run did; None before the first.
        self.tally: Tally | None = None
        #: Why it stepped aside in the last run, if it did.
        self.problem: Reason | None = None
        self._unet = unet
        self._run: Run | None = None
        self._checked: set[str] = set()

    # --- a run ------------------------------------------------------------------------------------

    def around_sampler(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's SAMPLER_SAMPLE wrapper: state begins and ends with one run."""
        before, self.problem = self._run, None
        begun = self._guarded(self._begin, *args)
        run, args = (None, args) if begun is None else begun
        self._run = run
        try:
            return executor(*args, **kwargs)
        finally:
            self._run = before
            if run is not None:
                self.tally = run.tally
            self._events.publish(Event.RUN_ENDED)

    def _begin(
        self, guider: Any, sigmas: torch.Tensor, extra: Any, callback: Any, *others: Any
    ) -> tuple[Run | None, tuple[Any, ...]]:
        """The run that begins, None where all of it is the host's, and the sampler's arguments with
        a callback that tells its steps.
        """
        if SEVERAL_CARDS in extra.get("model_options", {}):
            self.problem = of("deepcache_cards")
        elif self._is_copied(guider):
            self.problem = of("deepcache_moved")
        if self.problem is not None:
            logger.warning("DeepCache: %s", self.problem)
            return None, (guider, sigmas, extra, callback, *others)
        if not self.branch.is_current():
            self.branch = Branch(self._unet, self.branch.number)
        run = Run.begin(self.options, guider, sigmas)

        def after_step(number: int, *given: Any, **named: Any) -> Any:
            if self.problem is None:
                self._guarded(run.called_back, number)
            return None if callback is None else callback(number, *given, **named)

        return run, (guider, sigmas, extra, after_step, *others)

    def _is_copied(self, guider: Any) -> bool:
        """Whether the host made a copy of the UNet, with weights of its own, that runs here."""
        patcher = getattr(guider, "model_patcher", None)
        unet = None if patcher is None else models.diffusion_model(patcher)
        return unet is not self._unet and type(unet) is type(self._unet)

    def around_evaluation(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's PREDICT_NOISE wrapper: one evaluation of all conditionings."""
        if self._run is not None and self.problem is None:
            self._guarded(self._run.features.begin_evaluation)
        return executor(*args, **kwargs)

    # --- a call -----------------------------------------------------------------------------------

    def around_unet(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's DIFFUSION_MODEL wrapper: one call of the UNet, whole or shallow.

        What is ours runs before the call and after it; within it only what marks its own errors.
        """
        run = self._run
        if run is None or self.problem or host.owner(executor) is not self._unet:
            return executor(*args, **kwargs)
        step = self._guarded(self._prepare, run, executor, args, kwargs)
        if step is None:
            return executor(*args, **kwargs)
        try:
            output, feature = step.split(step.call())
        except OwnError as error:
            self._failed(error)
            self._guarded(step.before.restore)
            return executor(*args, **kwargs)
        self._guarded(self._finish, run, executor, step, output, feature)
        return output

    def _prepare(
        self, run: Run, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Step | None:
        """Decide how a call of the UNet is made; None: as the host makes it, from now on."""
        call = {**dict.fromkeys(ARGUMENTS), **dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        x, options = call["x"], call["transformer_options"]
        if (why := self._why_not(executor, options)) is not None:
            self._step_aside(why)
            return None
        shape = shape_of(x, call["context"], call["y"], call["control"], options)
        place = run.features.place(shape, patches_of(options, run.hooks))
        is_full = run.is_full(x, options.get("sigmas"))
        feature = None if is_full else run.features.find(place)
        sort = FULL if feature is None else SHALLOW
        before = Before.of(call)
        if feature is not None:
            step = Step(self._shallow(executor, feature, call), alone, before)
        elif is_full and not run.keeps:
            step = Step(functools.partial(executor, *args, **kwargs), alone, before)
        else:
            structure = repr((shape.structure, [patch.name for patch in place.patches]))
            random = None if structure in self._checked else random_state(x.device)
            make, split = self._whole(executor, call)
            step = Step(make, split, before, place, structure, random)
        self.evaluations[sort] += 1
        return step._replace(ended=run.tally.begin(sort, shape.chunks, x.device))

    def _finish(
        self,
        run: Run,
        executor: Any,
        step: Step,
        output: torch.Tensor,
        feature: torch.Tensor | None,
    ) -> None:
        """Note a call that was made, and keep its feature if it is the one of a whole call."""
        step.ended()
        if step.place is None or feature is None:
            return
        if step.random is not None and not self._is_right(executor, step, output, feature):
            self._step_aside(of("deepcache_unlike"))
            return
        self._checked.add(step.structure)
        run.features.keep(step.place, feature)
        run.tally.feature_bytes = max(run.tally.feature_bytes, run.features.bytes)

    def _why_not(self, executor: Any, options: dict[str, Any]) -> Reason | None:
        """Why the rest of this run is the host's, if it is."""
        if EASY_CACHE in options:
            return of("deepcache_easycache")
        if (kind := self.branch.foreign_class()) is not None:
            return of("deepcache_swapped", name=kind.__name__, owner=owner_of(kind))
        own = is_own_forward(host.innermost(executor), self._unet)
        return None if own else of("deepcache_replaced")

    def _whole(
        self, executor: Any, call: dict[str, Any]
    ) -> tuple[Callable[[], Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]]:
        """Run the whole UNet; how, and what takes output and feature from what that gives."""
        branch = self.branch
        if self._is_ours(executor):
            return within(executor, branch.whole, branch.whole.call, call), tuple
        kept: list[torch.Tensor | None] = []  # others within expect one tensor

        def whole(*args: Any, **kwargs: Any) -> torch.Tensor:
            output, feature = branch.full(*args, **kwargs)
            kept.append(feature)
            return output

        def split(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return output, kept[0] if kept else None  # another node may not have run it after all

        return within(executor, self._unet, whole, call), split

    def _shallow(
        self, executor: Any, feature: torch.Tensor, call: dict[str, Any]
    ) -> Callable[[], torch.Tensor]:
        """Run the outer blocks around a feature."""
        outer = self.branch.outer
        if self._is_ours(executor):
            return within(executor, outer, outer.call, {**call, "feature": feature})
        given = functools.partial(outer.call, feature=feature)
        return within(executor, self._unet, given, call)

    def _is_ours(self, executor: Any) -> bool:
        """Whether nothing of other nodes lies between here and the UNet."""
        return all(map(self._is_known, host.wrappers_within(executor)))

    def _is_right(
        self, executor: Any, step: Step, output: torch.Tensor, feature: torch.Tensor
    ) -> bool:
        """At the first full call of a structure: with the feature just kept, the shallow path must
        give the full output, bit for bit. Compiled, both may run through other kernels.
        """
        if step.random != random_state(output.device):  # the outer blocks would draw others
            return True
        found = self._shallow(executor, feature, step.before.copies)()
        if torch.equal(found, output):
            return True
        is_compiled = any(map(self._is_known, host.wrappers(executor)))
        return is_compiled and bool((found - output).norm() <= _COMPILED_REL_L2 * output.norm())

    # --- stepping aside ---------------------------------------------------------------------------

    def _guarded(self, ours: Callable[..., T], *args: Any) -> T | None:
        """Call what the host alone would not; where it fails, the rest of the run is the host's."""
        try:
            return ours(*args)
        except Exception as error:
            if is_interrupt(error):  # the user's, in whatever is running
                raise
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        text = str(error) if isinstance(error, OwnError) else f"{type(error).__name__}: {error}"
        short = shorten(text, 120, placeholder="...")
        self._step_aside(of("deepcache_failed", error=short), error)

    def _step_aside(self, why: Reason, error: Exception | None = None) -> None:
        """Leave the rest of this run to the host."""
        self.problem = why
        if self._run is not None:
            self._run.features = Features()  # their memory is the host's again
        logger.warning("DeepCache: %s", why, exc_info=error)
