"""A ControlNet and the UNet that it steers: eager against ours, interleaved in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..host import Size, apply_controlnet, conditioning, ksampler, load_controlnet
from ..measure import Mode, Probe, Stopwatch, elapsed_ms, mark, rel_l2, summary
from ..pack import brief, graph_files, open_engine, settle
from .common import BUILD_LIMIT_S, CAPTURE_STEPS, Pair, partial, unserved
from .speed import WARM_STEPS

STRENGTH = 0.8


class Side:
    """One model under one applied ControlNet, whose `get_control` is timed and can be kept."""

    def __init__(
        self,
        model: Any,
        probe: Probe,
        control: Any,
        kind: str,
        hint: Any,
        *,
        cfg: float = 7.0,
    ) -> None:
        prompts = [conditioning(kind, seed=1), conditioning(kind, seed=2)]
        self.control, self.prompts = apply_controlnet(control, prompts, hint, strength=STRENGTH)
        self.model, self.probe, self.cfg = model, probe, cfg
        self.keep = False
        self.kept: list[dict[str, Any]] = []
        self._marks: list[tuple[Any, Any]] = []
        self._get_control = self.control.get_control
        # The sampler takes this very object: the instance is what it asks.
        vars(self.control)["get_control"] = self._timed

    def sample(self, size: Size, *, steps: int, seed: int = 0) -> None:
        """One KSampler run; what was timed before is forgotten."""
        self._marks, self.kept = [], []
        positive, negative = self.prompts
        ksampler(self.model, positive, negative, size, steps=steps, cfg=self.cfg, seed=seed)

    def milliseconds(self, *, skip: int) -> list[float]:
        """Time of each `get_control` but the first `skip`."""
        return [elapsed_ms(begin, end) for begin, end in self._marks[skip:]]

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        begin = mark()
        found = self._get_control(*args, **kwargs)
        self._marks.append((begin, mark()))
        if self.keep:
            self.kept.append(
                {key: [t if t is None else t.clone() for t in ts] for key, ts in found.items()}
            )
        return found


def controlnet(
    *,
    model: str,
    control: str,
    kind: str,
    store: str,
    size: list[int],
    captured: bool = False,
    rounds: int = 5,
    steps: int = 8,
    workers: int = 0,
) -> dict[str, Any]:
    """Time the control alone and the whole step at one size, and compare what the control gives.

    Args:
        captured: replay the calls of both from CUDA graphs.

    Returns:
        {"control_speedup", "unet_speedup", "step_speedup", "eager" and "ours": {"control_ms",
        "unet_ms", "step_ms"}, "control_rel_l2", ...}; a step goes from one model call's begin to
        the next one's, so it holds control, UNet and sampler.
    """
    target, folder = Size(*size), Path(store)
    before = set(graph_files(folder))
    engine = open_engine(folder, workers=workers, captured=captured)
    watch = Stopwatch()
    pair = Pair(engine, Path(model))
    unet_seconds = watch.seconds()
    between = set(graph_files(folder))
    watch.restart()
    eager_control = load_controlnet(Path(control))
    load_seconds = watch.seconds()
    watch.restart()
    our_control = engine.compile_controlnet(eager_control, when_missing="wait")
    control_seconds = watch.seconds()
    hint = random_hint(target)
    sides = {
        "eager": Side(pair.eager, pair.eager_probe, eager_control, kind, hint),
        "ours": Side(pair.ours, pair.ours_probe, our_control, kind, hint),
    }
    settle_control(engine, pair, our_control, sides["ours"], target)
    files = graph_files(folder)
    result: dict[str, Any] = {
        "unet_build_seconds": round(unet_seconds, 2),
        "load_seconds": round(load_seconds, 2),
        "control_build_seconds": round(control_seconds, 2),
        "unet_builds": len(between - before),
        "control_builds": len(set(files) - between),
        "disk_mb": round(sum(files.values()) / 1e6, 2),
        "kinds": engine.report(our_control)["kinds"],
    }
    partial(result)
    if captured:
        sides["ours"].sample(target, steps=CAPTURE_STEPS)
    calls = compiled_calls(engine, pair, our_control)
    result.update(_time(sides, target, rounds=rounds, steps=steps))
    # Euler calls the model once a step; the first WARM_STEPS runs of `_time` count too.
    model_calls = WARM_STEPS + rounds * steps
    for name, thing in (("unet", pair.ours), ("control", our_control)):
        missing = unserved(engine.report(thing), calls[name], unet_calls=model_calls)
        result[f"{name}_eager_calls"] = missing
    result["control_rel_l2"] = control_errors(sides, target)
    result["report"] = brief(engine.report(pair.ours))
    result["control_report"] = brief(engine.report(our_control))
    result["captured"] = {
        name: engine.report(thing)["captured"]
        for name, thing in (("unet", pair.ours), ("control", our_control))
    }
    engine.close()
    return result


def random_hint(size: Size) -> Any:
    """An image of the size that a control is to read."""
    import torch

    generator = torch.Generator().manual_seed(5)
    return torch.rand(1, size.height, size.width, 3, generator=generator)


def settle_control(engine: Any, pair: Pair, control: Any, side: Side, size: Size) -> None:
    """Sample until a step runs all compiled, UNet and control, or nothing is left to wait for."""
    for _ in range(5):
        before = compiled_calls(engine, pair, control)
        side.sample(size, steps=1)
        things = {"unet": pair.ours, "control": control}
        if all(
            unserved(engine.report(thing), before[name], unet_calls=1) == 0
            for name, thing in things.items()
        ):
            return
        for thing in things.values():
            settle(engine, thing, limit_s=BUILD_LIMIT_S)


def compiled_calls(engine: Any, pair: Pair, control: Any) -> dict[str, int]:
    """Calls of regions that graphs have served so far."""
    return {
        "unet": pair.compiled_calls(),
        "control": int(engine.report(control)["calls"]["compiled"]),
    }


def _time(sides: dict[str, Side], size: Size, *, rounds: int, steps: int) -> dict[str, Any]:
    """Take turns between the sides; each turn is a KSampler run of its own."""
    times: dict[str, dict[str, list[float]]] = {
        name: {"control_ms": [], "unet_ms": [], "step_ms": []} for name in sides
    }
    for side in sides.values():
        side.sample(size, steps=WARM_STEPS)
    for turn in range(rounds):
        for name, side in sides.items():
            side.probe.start(Mode.TIME)
            side.sample(size, steps=steps, seed=turn)
            times[name]["control_ms"] += side.milliseconds(skip=WARM_STEPS)
            times[name]["unet_ms"] += side.probe.milliseconds(skip=WARM_STEPS)
            times[name]["step_ms"] += side.probe.step_milliseconds(skip=WARM_STEPS)
            side.probe.start(Mode.OFF)
    row: dict[str, Any] = {
        name: {key: summary(values) for key, values in found.items()}
        for name, found in times.items()
    }
    for part in ("control", "unet", "step"):
        eager, ours = (row[name][f"{part}_ms"]["median"] for name in ("eager", "ours"))
        row[f"{part}_speedup"] = round(eager / ours, 3)
    return row


def control_errors(sides: dict[str, Side], size: Size) -> dict[str, Any]:
    """Relative L2 error of each tensor that the control adds at a first step, whose inputs agree.

    Raises:
        RuntimeError: one side gives a tensor where the other gives none.
    """
    found = {}
    for name, side in sides.items():
        side.keep = True
        side.sample(size, steps=1)
        found[name] = side.kept[0]
        side.keep = False
    errors = []
    for key, references in found["eager"].items():
        results = found["ours"][key]
        if [t is None for t in results] != [t is None for t in references]:
            raise RuntimeError(f"both must give the same tensors as {key}, got others")
        errors += [
            rel_l2(result, reference)
            for result, reference in zip(results, references, strict=True)
            if reference is not None
        ]
    return {"max": max(errors), "tensors": len(errors), "each": errors}
