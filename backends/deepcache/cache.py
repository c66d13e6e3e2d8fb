"""DeepCache on one MODEL: what happens around a sampler run and around each call of the UNet.

The feature of a call is reused by calls that are like it in everything that shapes it
(`features.Place`); whatever is not, runs as a full one. Only counts outlive the run.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .branches import Branch
from .features import form_of
from .patches import patches_of
from .run import Options, Run
from .shares import shares, usual_side
from .tally import FULL, SHALLOW, Tally

logger = logging.getLogger(__name__)

_NAMES = ("x", "timesteps", "context", "y", "control", "transformer_options")
#: How far two ways through compiled graphs may lie apart, in half precision.
_COMPILED_REL_L2 = 1e-2
#: What the host's EasyCache and LazyCache leave in a call.
_ANOTHER_CACHE = "easycache"
_STEPS_ASIDE = (
    "ComfyUI's EasyCache or LazyCache is on this model, too, and it decides which steps run: "
    "DeepCache steps aside, for a step that is skipped leaves no feature. Use one of them"
)
_REPLACED = "steps aside: another node replaces the UNet's own forward, which it would cut in two"
_SWAPPED = "steps aside: another node runs the UNet by a class of its own ({} of {})"
_UNLIKE = "steps aside: with these patches the outer blocks do not give what the whole model gives"


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
        self._checked: set[str] = set()

    # --- a run ------------------------------------------------------------------------------------

    def around_sampler(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's SAMPLER_SAMPLE wrapper: state begins and ends with one run."""
        guider, sigmas, extra, callback, *others = args
        if not self.branch.is_current():
            self.branch = Branch(self._unet, self.branch.number)
        run, before = Run.begin(self.options, guider, sigmas), self._run

        def after_step(number: int, *given: Any, **named: Any) -> Any:
            run.called_back(number)
            return None if callback is None else callback(number, *given, **named)

        self._run, self.problem = run, None
        try:
            return executor(guider, sigmas, extra, after_step, *others, **kwargs)
        finally:
            self._run, self.tally = before, run.tally
            self.on_end()

    def around_evaluation(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's PREDICT_NOISE wrapper: one evaluation of all conditionings."""
        if self._run is not None:
            self._run.features.begin_evaluation()
        return executor(*args, **kwargs)

    # --- a call -----------------------------------------------------------------------------------

    def around_unet(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's DIFFUSION_MODEL wrapper: one call of the UNet, whole or shallow."""
        run = self._run
        if run is None or self.problem or executor.class_obj is not self._unet:
            return executor(*args, **kwargs)
        call = {**dict.fromkeys(_NAMES), **dict(zip(_NAMES, args, strict=False)), **kwargs}
        x, options = call["x"], call["transformer_options"]
        if (why := self._why_not(executor, options)) is not None:
            self._step_aside(why)
            return executor(*args, **kwargs)
        form = form_of(x, call["context"], call["y"], call["control"], options)
        place = run.features.place(form, patches_of(options, run.hooks))
        is_full = run.is_full(x, options.get("sigmas"))
        feature = None if is_full else run.features.find(place)
        sort = FULL if feature is None else SHALLOW
        self.evaluations[sort] += 1
        evaluation = run.tally.evaluation(sort, form.chunks, x.device)
        if feature is not None:
            with evaluation:
                return self._shallow(executor, feature, call)
        if is_full and not run.keeps:
            with evaluation:
                return executor(*args, **kwargs)
        structure = repr((form.structure, [patch.name for patch in place.patches]))
        before = None if structure in self._checked else _Before.of(call)
        with evaluation:
            output, feature = self._whole(executor, call)
        if feature is None:
            return output
        if before is not None and not self._is_right(executor, output, feature, before):
            self._step_aside(_UNLIKE)
            return output
        self._checked.add(structure)
        run.features.keep(place, feature)
        run.tally.feature_bytes = max(run.tally.feature_bytes, run.features.bytes)
        return output

    def _why_not(self, executor: Any, options: dict[str, Any]) -> str | None:
        """Why the rest of this run is the host's, if it is."""
        if _ANOTHER_CACHE in options:
            return _STEPS_ASIDE
        if (kind := self.branch.foreign_class()) is not None:
            return _SWAPPED.format(kind.__name__, kind.__module__.partition(".")[0])
        own = getattr(executor.original, "__func__", None) is type(self._unet)._forward
        return None if own else _REPLACED

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
        self, executor: Any, output: torch.Tensor, feature: torch.Tensor, before: _Before
    ) -> bool:
        """At the first full call of a structure: with the feature just kept, the shallow path must
        give the full output, bit for bit. Compiled, both may run through other kernels.
        """
        if before.random != _random_state(output.device):  # the outer blocks would draw others
            return True
        found = self._shallow(executor, feature, before.call)
        if torch.equal(found, output):
            return True
        is_compiled = any(map(self._is_known, executor.wrappers))
        return is_compiled and bool((found - output).norm() <= _COMPILED_REL_L2 * output.norm())

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


class _Before(NamedTuple):
    """How things are before a full call: its arguments, whose containers the host uses up, and
    where the random numbers are.
    """

    call: dict[str, Any]
    random: bytes

    @classmethod
    def of(cls, call: dict[str, Any]) -> _Before:
        control = call["control"]
        copied = {
            **call,
            "transformer_options": dict(call["transformer_options"]),
            "control": control and {side: list(given) for side, given in control.items()},
        }
        return cls(copied, _random_state(call["x"].device))


def _random_state(device: torch.device) -> bytes:
    """Where PyTorch's random numbers are, without waiting for the GPU."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return b"".join(state.numpy().tobytes() for state in states)
