"""DeepCache on one MODEL: what happens around a sampler run and around each call of the UNet.

A call's feature is reused by calls that equal it in everything that shapes it
(`features.CallShape`); all others run in full. Only counts outlive the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..caching.cache import Cache
from ..caching.others import other_cache
from ..caching.patches import patches_of
from ..caching.tally import FULL, SHALLOW
from ..code.packs import owner_of
from ..events import Events
from ..host_api import models
from ..host_api import patcher as host
from ..host_api.options import SEVERAL_CARDS
from ..host_api.sampling import sampled
from ..host_api.unets import ARGUMENTS, is_own_forward
from ..kinds.tolerance import REPEATED_L2, judge
from ..reasons import Reason, of
from .branches import Branch
from .calls import Before, UNetStep, alone, random_state, within
from .features import bytes_of, shape_of
from .guard import OwnError
from .run import DeepCacheOptions, DeepCacheRun
from .shares import shares


class DeepCache(Cache[DeepCacheRun]):
    """Keeps deep features of one UNet within each sampler run."""

    name = "DeepCache"
    failed_key = "deepcache_failed"

    def __init__(
        self,
        branch: Branch,
        options: DeepCacheOptions,
        events: Events,
        *,
        identifier: str,
        is_known: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        """Set up for one clone of a model.

        Args:
            branch: the host's UNetModel as cut in two; its blocks are used and never changed.
            options: what the user chose.
            events: gets the end of each run.
            identifier: its name in reports.
            is_known: which wrappers of a UNet's call know its copies.
        """
        super().__init__(events, identifier=identifier)
        unet: Any = branch.whole.of
        self.options = options
        self._is_known = is_known
        self.branch = branch
        #: What part of a step's arithmetic a shallow one is, by branch.
        self.costs = shares(unet)
        self._unet = unet
        self._checked: set[str] = set()

    # --- a run ------------------------------------------------------------------------------------

    def _begin(
        self, guider: Any, sigmas: torch.Tensor, extra: Any, *others: Any
    ) -> DeepCacheRun | None:
        options = extra.get("model_options", {})
        if (theirs := other_cache(sampled(guider), options)) is not None:
            self._step_aside(theirs)
        elif SEVERAL_CARDS in options:
            self._step_aside(of("deepcache_cards"))
        elif self._is_copied(guider):
            self._step_aside(of("deepcache_moved"))
        if self.problem is not None:
            return None
        if not self.branch.is_current():
            self.branch = Branch(self._unet, self.branch.number)
        return DeepCacheRun.begin(self.options, guider, sigmas)

    def _is_copied(self, guider: Any) -> bool:
        """Whether a copy of the UNet, with its own weights, runs here."""
        patcher = getattr(guider, "model_patcher", None)
        unet = None if patcher is None else models.diffusion_model(patcher)
        return unet is not self._unet and type(unet) is type(self._unet)

    # --- a call -----------------------------------------------------------------------------------

    def around_unet(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's DIFFUSION_MODEL wrapper: one call of the UNet, whole or shallow.

        Our code runs before and after the call; within it only code that marks its own errors.
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
            self._failed(error, str(error))
            self._guarded(step.before.restore)
            return executor(*args, **kwargs)
        self._guarded(self._finish, run, executor, step, output, feature)
        return output

    def _prepare(
        self, run: DeepCacheRun, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> UNetStep | None:
        """Decide how a call of the UNet is made; None: as the host makes it, from now on."""
        call = {**dict.fromkeys(ARGUMENTS), **dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        x, options = call["x"], call["transformer_options"]
        if (why := self._why_not(executor)) is not None:
            self._step_aside(why)
            return None
        shape = shape_of(x, call["context"], call["y"], call["control"], options)
        place = run.kept.place(shape, patches_of(options, run.hooks))
        is_full = run.is_full(x, options.get("sigmas"))
        feature = None if is_full else run.kept.find(place)
        sort = FULL if feature is None else SHALLOW
        before = Before.of(call)
        if feature is not None:
            step = UNetStep(self._shallow(executor, feature, call), alone, before)
        elif is_full and not run.keeps:
            step = UNetStep(functools.partial(executor, *args, **kwargs), alone, before)
        else:
            structure = repr((shape.structure, [patch.name for patch in place.patches]))
            random = None if structure in self._checked else random_state(x.device)
            make, split = self._whole(executor, call)
            step = UNetStep(make, split, before, place, structure, random)
        self.evaluations[sort] += 1
        return step._replace(ended=run.tally.begin(sort, shape.chunks, x.device))

    def _finish(
        self,
        run: DeepCacheRun,
        executor: Any,
        step: UNetStep,
        output: torch.Tensor,
        feature: torch.Tensor | None,
    ) -> None:
        """Note a finished call, and keep its feature if it was a whole one."""
        step.ended()
        if step.place is None or feature is None:
            return
        if step.random is not None and not self._is_right(executor, step, output, feature):
            self._step_aside(of("deepcache_unlike"))
            return
        self._checked.add(step.structure)
        run.kept.keep(step.place, feature)
        run.tally.feature_bytes = max(run.tally.feature_bytes, bytes_of(run.kept))

    def _why_not(self, executor: Any) -> Reason | None:
        """Why the host makes the rest of this run, if so."""
        if (kind := self.branch.foreign_class()) is not None:
            return of("deepcache_swapped", name=kind.__name__, owner=owner_of(kind))
        own = is_own_forward(host.innermost(executor), self._unet)
        return None if own else of("deepcache_replaced")

    def _whole(
        self, executor: Any, call: dict[str, Any]
    ) -> tuple[Callable[[], Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]]:
        """Run the whole UNet: the function to call, and one that takes output and feature from its
        result.
        """
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
        self, executor: Any, step: UNetStep, output: torch.Tensor, feature: torch.Tensor
    ) -> bool:
        """At the first full call of a structure: with the feature just kept, the shallow path must
        return the full output, bit for bit, or nearly so where both run compiled.
        """
        if step.random != random_state(output.device):  # the outer blocks would draw other numbers
            return True
        found = self._shallow(executor, feature, step.before.copies)()
        if torch.equal(found, output):
            return True
        is_compiled = any(map(self._is_known, host.wrappers(executor)))
        return is_compiled and judge([found], [output], most=REPEATED_L2).is_good
