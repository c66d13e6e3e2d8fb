"""DeepCache on one MODEL: what happens around a sampler run and around each call of the UNet.

A run's steps are told by its sampler, which calls back in each: what is evaluated between two
callbacks is of one sort, full or shallow. A sampler that evaluates twice a step (Heun, DPM2) calls
back after the first, so the second goes with the first of the next step, which is at the same or a
lower sigma; nothing waits for the GPU to learn a sigma.

The feature of a call is reused by calls that are like it in everything that shapes it
(`features.Form`, patches); whatever is not, runs as a full one. Only counts outlive
the run.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .branches import Branch
from .features import Features, form_of, patches_of
from .schedule import Drift, Schedule, custom, in_range, quadratic, uniform
from .shares import shares, usual_side
from .tally import FULL, SHALLOW, Tally

logger = logging.getLogger(__name__)

_NAMES = ("x", "timesteps", "context", "y", "control", "transformer_options")
#: What the host's EasyCache and LazyCache leave in a call.
_ANOTHER_CACHE = "easycache"
_STEPS_ASIDE = (
    "ComfyUI's EasyCache or LazyCache is on this model, too, and it decides which steps run: "
    "DeepCache steps aside, for a step that is skipped leaves no feature. Use one of them"
)
_UNLIKE = "steps aside: with these patches the outer blocks do not give what the whole model gives"


@dataclass(frozen=True)
class Options:
    """What the user chose on the node.

    Attributes:
        interval: steps from one full step to the next.
        branch: where the UNet is cut, 0 being the outermost; beyond its depth, the deepest.
        start_percent, end_percent: the part of the run in which steps are shallow, 0 to 1.
        center, power: of the quadratic schedule.
        full_steps: of the custom schedule.
        threshold: of the adaptive schedule (`schedule.Drift`).
    """

    interval: int = 3
    branch: int = 0
    schedule: Schedule = Schedule.UNIFORM
    start_percent: float = 0.0
    end_percent: float = 1.0
    center: float = 0.3
    power: float = 1.4
    full_steps: tuple[int, ...] = ()
    threshold: float = 0.4

    def full(self, steps: range) -> frozenset[int]:
        """Return which of these steps compute the whole UNet."""
        if self.schedule is Schedule.CUSTOM:
            return custom(steps, self.full_steps)
        if self.schedule is Schedule.QUADRATIC:
            return quadratic(steps, self.interval, center=self.center, power=self.power)
        return uniform(steps, self.interval)


class Run:
    """One sampler run."""

    def __init__(self, steps: range, full: frozenset[int], drift: Drift | None = None) -> None:
        """Args: the steps that may be shallow; those among them that are full, or what tells."""
        self.features = Features()
        self.tally = Tally()
        #: The step that is being made.
        self.step = 0
        self._steps, self._full, self._drift = steps, full, drift

    def is_full(self, x: torch.Tensor, sigmas: torch.Tensor | None) -> bool:
        """Whether this step computes the whole UNet.

        Args:
            x, sigmas: of the call that is to be made; the first of a step decides for all of it.
        """
        if self.step not in self._steps:
            return True
        if self._drift is None:
            return self.step in self._full
        return self._drift.is_full(self.step, x, sigmas)

    @property
    def keeps(self) -> bool:
        """Whether a shallow step may come next, for which this one's feature is kept."""
        following = self.step + 1
        return following in self._steps and (self._drift is not None or following not in self._full)


class DeepCache:
    """Keeps deep features of one UNet within each sampler run."""

    def __init__(
        self, branch: Branch, options: Options, is_known: Callable[[Any], bool] = lambda _: False
    ) -> None:
        """Args: the host's UNetModel as cut in two, whose blocks are used and never changed; what
        the user chose; and which wrappers of a UNet's call know its variants.
        """
        unet: Any = branch.whole.of
        self.options = options
        self._is_known = is_known
        self.branch = branch
        #: What part of a step's arithmetic a shallow one is, by branch, for images of this side.
        self.costs, self.side = shares(unet), usual_side(unet)
        #: Evaluations so far, by sort: "full", "shallow".
        self.evaluations: Counter[str] = Counter()
        #: What the last run did; None before the first.
        self.tally: Tally | None = None
        #: Why it stepped aside in the last run, if it did.
        self.problem: str | None = None
        #: Called after each run.
        self.on_end: Callable[[], None] = lambda: None
        self._unet = unet
        self._run: Run | None = None
        self._checked: set[Any] = set()

    # --- a run ------------------------------------------------------------------------------------

    def around_sampler(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's SAMPLER_SAMPLE wrapper: state begins and ends with one run."""
        guider, sigmas, extra, callback, *others = args
        run, before = self._begin(guider, sigmas), self._run

        def after_step(number: int, *given: Any, **named: Any) -> Any:
            run.step = number + 1
            return None if callback is None else callback(number, *given, **named)

        self._run, self.problem = run, None
        try:
            return executor(guider, sigmas, extra, after_step, *others, **kwargs)
        finally:
            self._run, self.tally = before, run.tally
            self.on_end()

    def _begin(self, guider: Any, sigmas: torch.Tensor) -> Run:
        options, sampling = self.options, guider.inner_model.model_sampling
        ends = [sampling.percent_to_sigma(p) for p in (options.start_percent, options.end_percent)]
        steps = in_range(sigmas.tolist(), *map(float, ends))  # the run's one wait for the GPU
        if options.schedule is Schedule.ADAPTIVE:
            return Run(steps, frozenset(), Drift(options.threshold))
        return Run(steps, options.full(steps))

    # --- a call -----------------------------------------------------------------------------------

    def around_unet(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's DIFFUSION_MODEL wrapper: one call of the UNet, whole or shallow."""
        run = self._run
        if run is None or self.problem or executor.class_obj is not self._unet:
            return executor(*args, **kwargs)
        call = {**dict.fromkeys(_NAMES), **dict(zip(_NAMES, args, strict=False)), **kwargs}
        x, options = call["x"], call["transformer_options"]
        if _ANOTHER_CACHE in options:
            self._step_aside(_STEPS_ASIDE)
            return executor(*args, **kwargs)
        form = form_of(x, call["context"], call["y"], call["control"], options)
        patches = patches_of(options)
        is_full = run.is_full(x, options.get("sigmas"))
        feature = None if is_full else run.features.find(form, patches)
        sort = FULL if feature is None else SHALLOW
        self.evaluations[sort] += 1
        evaluation = run.tally.evaluation(sort, form.chunks, x.device)
        if feature is not None:
            with evaluation:
                return self._shallow(executor, feature, call)
        if is_full and not run.keeps:
            run.features.drop(form, patches)
            with evaluation:
                return executor(*args, **kwargs)
        again = _copied(call)
        with evaluation:
            output, feature = self._whole(executor, call)
        structure = (form.structure, [(kind, place, len(given)) for kind, place, given in patches])
        if feature is not None and self._is_right(executor, output, feature, structure, again):
            run.features.keep(form, patches, feature)
            run.tally.feature_bytes = max(run.tally.feature_bytes, run.features.bytes)
        return output

    def _whole(
        self, executor: Any, call: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the whole UNet; the feature is None where another node did not run it after all."""
        branch = self.branch
        if self._is_ours(executor):
            both: tuple[torch.Tensor, torch.Tensor]
            both = _within(executor, branch.whole, branch.whole.call, call)
            return both
        kept: list[torch.Tensor] = []  # others within expect one tensor

        def whole(*args: Any, **kwargs: Any) -> torch.Tensor:
            output, feature = branch.full(*args, **kwargs)
            kept.append(feature)
            return output

        output: torch.Tensor = _within(executor, self._unet, whole, call)
        return output, kept[0] if kept else None

    def _shallow(self, executor: Any, feature: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
        outer = self.branch.outer
        if self._is_ours(executor):
            owner, run, given = outer, outer.call, {**call, "feature": feature}
        else:
            owner, run, given = self._unet, functools.partial(outer.call, feature=feature), call
        result: torch.Tensor = _within(executor, owner, run, given)
        return result

    def _is_ours(self, executor: Any) -> bool:
        """Whether nothing of other nodes lies between here and the UNet."""
        return all(map(self._is_known, executor.wrappers[executor.idx + 1 :]))

    def _is_right(
        self,
        executor: Any,
        output: torch.Tensor,
        feature: torch.Tensor,
        structure: Any,
        call: dict[str, Any],
    ) -> bool:
        """At the first full call of a structure: with the feature just kept, the shallow path must
        give the full output, bit for bit.
        """
        key = repr(structure)
        if key not in self._checked:
            if not torch.equal(self._shallow(executor, feature, call), output):
                self._step_aside(_UNLIKE)
                return False
            self._checked.add(key)
        return True

    def _step_aside(self, why: str) -> None:
        """Leave the rest of this run to the host."""
        self.problem = why
        logger.warning("DeepCache: %s", why)


def _within(executor: Any, owner: Any, run: Callable[..., Any], call: dict[str, Any]) -> Any:
    """Call a function in place of the UNet's own forward, within the wrappers that are left.

    Args:
        owner: whose function it is, as those wrappers are told: a variant, or the UNet.
    """
    from comfy.patcher_extension import WrapperExecutor

    inner = WrapperExecutor.new_class_executor(run, owner, executor.wrappers, executor.idx + 1)
    rest = {name: value for name, value in call.items() if name not in _NAMES}
    return inner.execute(*(call[name] for name in _NAMES), **rest)


def _copied(call: dict[str, Any]) -> dict[str, Any]:
    """The same call; the host uses its containers up."""
    control = call["control"]
    return {
        **call,
        "transformer_options": dict(call["transformer_options"]),
        "control": control if control is None else {s: list(r) for s, r in control.items()},
    }
