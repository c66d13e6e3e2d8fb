"""DeepCache on one MODEL: what happens around a sampler run and around each call of the UNet.

A run's steps are told by its sampler: after each step the sampler calls back. Every evaluation
until then belongs to the step: in a full step all of them compute the whole UNet, in the others all
reuse the feature of the last full one. A sampler that evaluates twice a step (Heun, DPM2) does so
within the same numbers of full and shallow steps; nothing waits for the GPU to learn a sigma.

The feature of a call is reused by calls that are like it in everything that shapes it
(`features.Form`, patches); whatever is not, runs as a full one. Nothing outlives the run.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .branches import Branch, depth
from .features import Features, Form, form_of, patches_of
from .schedule import Schedule, custom, in_range, quadratic, uniform

logger = logging.getLogger(__name__)

_NAMES = ("x", "timesteps", "context", "y", "control", "transformer_options")


@dataclass(frozen=True)
class Options:
    """What the user chose on the node.

    Attributes:
        interval: steps from one full step to the next.
        branch: where the UNet is cut, 0 being the outermost; beyond its depth, the deepest.
        start_percent, end_percent: the part of the run in which steps are shallow, 0 to 1.
        center, power: of the quadratic schedule.
        full_steps: of the custom schedule.
    """

    interval: int = 3
    branch: int = 0
    schedule: Schedule = Schedule.UNIFORM
    start_percent: float = 0.0
    end_percent: float = 1.0
    center: float = 0.3
    power: float = 1.4
    full_steps: tuple[int, ...] = ()

    def full(self, steps: range) -> frozenset[int]:
        """Return which of these steps compute the whole UNet."""
        if self.schedule is Schedule.CUSTOM:
            return custom(steps, self.full_steps)
        if self.schedule is Schedule.QUADRATIC:
            return quadratic(steps, self.interval, center=self.center, power=self.power)
        return uniform(steps, self.interval)


class Run:
    """One sampler run."""

    def __init__(self, steps: range, full: frozenset[int]) -> None:
        """Args: the steps that may be shallow, and those among them that are full."""
        self.features = Features()
        #: The step that is being made.
        self.step = 0
        self._steps, self._full = steps, full

    @property
    def is_full(self) -> bool:
        """Whether this step computes the whole UNet."""
        return self.step not in self._steps or self.step in self._full

    @property
    def keeps(self) -> bool:
        """Whether a shallow step comes next, for which this one's feature is kept."""
        return self.step + 1 in self._steps and self.step + 1 not in self._full


class DeepCache:
    """Keeps deep features of one UNet within each sampler run."""

    def __init__(
        self, unet: Any, options: Options, is_known: Callable[[Any], bool] = lambda _: False
    ) -> None:
        """Args: the host's UNetModel, whose blocks are used and never changed; what the user chose;
        and which wrappers of a UNet's call know its variants.
        """
        self.options = options
        self._is_known = is_known
        self.branch = Branch(unet, min(options.branch, depth(unet) - 1))
        #: Evaluations so far, by sort: "full", "shallow".
        self.evaluations: Counter[str] = Counter()
        #: Why it stepped aside, if it did.
        self.problem: str | None = None
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

        self._run = run
        try:
            return executor(guider, sigmas, extra, after_step, *others, **kwargs)
        finally:
            self._run = before

    def _begin(self, guider: Any, sigmas: torch.Tensor) -> Run:
        options, sampling = self.options, guider.inner_model.model_sampling
        ends = [sampling.percent_to_sigma(p) for p in (options.start_percent, options.end_percent)]
        steps = in_range(sigmas.tolist(), *map(float, ends))  # the run's one wait for the GPU
        return Run(steps, options.full(steps))

    # --- a call -----------------------------------------------------------------------------------

    def around_unet(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's DIFFUSION_MODEL wrapper: one call of the UNet, whole or shallow."""
        run = self._run
        if run is None or self.problem or executor.class_obj is not self._unet:
            return executor(*args, **kwargs)
        call = {**dict.fromkeys(_NAMES), **dict(zip(_NAMES, args, strict=False)), **kwargs}
        options = call["transformer_options"]
        form = form_of(call["x"], call["context"], call["y"], call["control"], options)
        patches = patches_of(options)
        feature = None if run.is_full else run.features.find(form, patches)
        if feature is not None:
            self.evaluations["shallow"] += 1
            return self._shallow(executor, feature, call)
        self.evaluations["full"] += 1
        if not run.keeps and run.is_full:
            run.features.drop(form, patches)
            return executor(*args, **kwargs)
        return self._full(executor, run, form, patches, call)

    def _full(
        self, executor: Any, run: Run, form: Form, patches: list[Any], call: dict[str, Any]
    ) -> torch.Tensor:
        again = _copied(call)
        output, feature = self._whole(executor, call)
        structure = (form.structure, [(kind, place, len(given)) for kind, place, given in patches])
        if feature is not None and self._is_right(executor, output, feature, structure, again):
            run.features.keep(form, patches, feature)
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
                self.problem = (
                    "steps aside: with these patches the outer blocks do not give what the whole "
                    "model gives"
                )
                logger.warning("DeepCache %s", self.problem)
                return False
            self._checked.add(key)
        return True


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
