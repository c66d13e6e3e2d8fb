"""Timing, error and statistics around a model's calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

PROBE_KEY = "warmgraph.benchmark"
MIB = 1024**2


class Mode(Enum):
    """What a probe does with the calls that pass it."""

    OFF = "off"
    TIME = "time"
    RECORD = "record"
    REPLAY = "replay"


class Call(NamedTuple):
    """One recorded UNet call: tensor inputs in order (None where there was none; a list where there
    are several latents), output (one row where there are several).
    """

    inputs: tuple[Any, ...]
    output: Any


class Probe:
    """Sits outermost around a patcher's model calls, and times, records or replays them.

    It is added to a clone *before* anything else is, so whatever is added later (ours, a compiled
    model) runs inside it. `REPLAY` gives the wrapped model the recorded inputs in the recorded
    order, whatever the sampler asks, so that two models see the same inputs call by call.
    """

    def __init__(self) -> None:
        self.mode = Mode.OFF
        self.calls: list[Call] = []
        self.passed = 0  # model calls so far, in any mode
        self._replay: Sequence[Call] = ()
        self._marks: list[tuple[Any, Any]] = []

    def attach(self, patcher: Any, *, records: bool = True) -> Any:
        """Return a clone of the patcher with this probe around its calls.

        Args:
            records: whether it may record and replay, too, for which the diffusion model's own call
                has it as another node's code.
        """
        from comfy.patcher_extension import WrappersMP

        clone = patcher.clone()
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, PROBE_KEY, self._around_apply)
        if records:
            clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, PROBE_KEY, self._around_unet)
        return clone

    def start(self, mode: Mode, replay: Sequence[Call] = ()) -> None:
        """Forget what was measured and begin anew."""
        self.mode, self.calls, self._replay, self._marks = mode, [], replay, []

    def milliseconds(self, *, skip: int) -> list[float]:
        """Time of each model call but the first `skip`, by the GPU's clock if there is one."""
        pairs = self._marks[skip:]
        return [elapsed_ms(begin, end) for begin, end in pairs]

    def step_milliseconds(self, *, skip: int) -> list[float]:
        """Time from each model call's begin to the next one's: a whole sampler step."""
        begins = [begin for begin, _ in self._marks[skip:]]
        return [elapsed_ms(begins[n], begins[n + 1]) for n in range(len(begins) - 1)]

    def _around_apply(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.passed += 1
        if self.mode is not Mode.TIME:
            return executor(*args, **kwargs)
        begin = mark()
        output = executor(*args, **kwargs)
        self._marks.append((begin, mark()))
        return output

    def _around_unet(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if self.mode not in (Mode.RECORD, Mode.REPLAY):
            return executor(*args, **kwargs)
        if self.mode is Mode.REPLAY:
            recorded = self._replay[len(self.calls)].inputs
            shapes = [_shape(a) for a in args[: len(recorded)]]
            if shapes != [_shape(a) for a in recorded]:
                raise RuntimeError(
                    f"replayed call must have the recorded shapes, got {shapes} for "
                    f"{[_shape(a) for a in recorded]}: the host batched the prompts differently"
                )
            data = [a if r is None else _like(r, a) for a, r in zip(args, recorded, strict=False)]
            args = (*data, *args[len(recorded) :])
        # x, timesteps, context, y: the inputs that hold data, copied, for a model may write there.
        inputs = tuple(map(_copied, args[:4]))
        output = executor(*args, **kwargs)
        made = output if isinstance(output, list) else [output]
        row = output.clone() if len(made) == 1 else torch.cat([each.flatten() for each in made])
        self.calls.append(Call(inputs, row))
        return output


def flat(latent: Any) -> Any:
    """The numbers of a latent in float32, one after the other; of a video before its sound's."""
    import torch

    parts = latent.unbind() if latent.is_nested else [latent]
    return torch.cat([part.flatten().float() for part in parts])


def rel_l2(output: Any, reference: Any) -> float:
    """|output - reference| / |reference| in float64; NaN or another shape counts as infinite."""
    if output.shape != reference.shape:
        return float("inf")
    error = (output.double() - reference.double()).norm() / reference.double().norm()
    value = float(error)
    return value if value == value else float("inf")


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and count of a series of milliseconds."""
    if len(values) < 2:
        return {"median": round(values[0], 3), "n": 1} if values else {"n": 0}
    low, _, high = statistics.quantiles(values, n=4)
    return {
        "median": round(statistics.median(values), 3),
        "q1": round(low, 3),
        "q3": round(high, 3),
        "min": round(min(values), 3),
        "n": len(values),
    }


class Stopwatch:
    """Wall-clock seconds, with the GPU's queue emptied at both ends."""

    def __init__(self) -> None:
        from .host import synchronize

        self._synchronize = synchronize
        self.restart()

    def restart(self) -> None:
        self._synchronize()
        self._begin = time.perf_counter()

    def seconds(self) -> float:
        self._synchronize()
        return time.perf_counter() - self._begin


def vram_used_mib() -> float:
    """What all processes hold of the GPU's memory, by the driver's count; 0 on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def torch_used_mib() -> float:
    """What PyTorch holds for this process on the GPU, besides weights in dynamic VRAM and captured
    calls under `cudaMallocAsync`, which the driver counts; 0 on a CPU.
    """
    import torch

    return torch.cuda.memory_allocated() / MIB if torch.cuda.is_available() else 0.0


def start_peak() -> None:
    """Forget what PyTorch held at most until now."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_mib() -> float:
    """What PyTorch held at most since `start_peak`, weights in dynamic VRAM aside; 0 on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated() / MIB if torch.cuda.is_available() else 0.0


def mark() -> Any:
    """Note this point in the GPU's queue; by this process's clock where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(begin: Any, end: Any) -> float:
    """Milliseconds between two marks; waits for the second."""
    if isinstance(begin, float):
        return float((end - begin) * 1000.0)
    end.synchronize()
    return float(begin.elapsed_time(end))


def _tensors(value: Any) -> list[Any] | None:
    """The tensors of an input; None where it has none."""
    import torch

    found = value if isinstance(value, (list, tuple)) else [value]
    return list(found) if all(isinstance(each, torch.Tensor) for each in found) else None


def _shape(value: Any) -> list[tuple[int, ...]] | None:
    found = _tensors(value)
    return None if found is None else [tuple(each.shape) for each in found]


def _copied(value: Any) -> Any:
    found = _tensors(value)
    if found is None:
        return None
    copies = [each.clone() for each in found]
    return copies if isinstance(value, (list, tuple)) else copies[0]


def _like(recorded: Any, value: Any) -> Any:
    """A recorded input in the dtype of this call's: a model may compute in another one."""
    if isinstance(recorded, list):
        return type(value)(r.to(v.dtype) for r, v in zip(recorded, value, strict=True))
    return recorded.to(value.dtype)
