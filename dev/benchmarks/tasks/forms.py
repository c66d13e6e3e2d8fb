"""How quick each form of a call is: eager, exact and any-shape by turns."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

from ..host import Size, end_node, load_vae
from ..kernels import kernel_times
from ..measure import Probe, Stopwatch, vram_used_mib
from ..pack import brief, open_engine
from .common import CAPTURE_STEPS, Pair, errors, partial, sample, unserved
from .residency import empty_caches
from .speed import ratio, time_pair
from .vae import settle_vae

IMAGES = 3


class Forms:
    """One file in every form, a probe outermost on each: name -> model and probe in `models`."""

    def __init__(self, engine: Any, path: Path, kind: str, first: Size) -> None:
        """Load it, and wait until all any-shape graphs are there and serve a call of `first`."""
        self.engine, self.kind = engine, kind
        self.pair = Pair(engine, path)
        self.pair.settle(kind, first)
        self.models: dict[str, tuple[Any, Probe]] = {
            "eager": (self.pair.eager, self.pair.eager_probe),
            "exact": self._exact(),
            "any_shape": (self.pair.ours, self.pair.ours_probe),
        }

    @property
    def ours(self) -> dict[str, tuple[Any, Probe]]:
        """All forms but the host's own."""
        return {name: model for name, model in self.models.items() if name != "eager"}

    def capture(self, size: Size) -> None:
        """Have the calls of this size captured in every form that replays."""
        for model, _ in self.ours.values():
            sample(model, self.kind, size, steps=CAPTURE_STEPS)

    def errors(self, size: Size, *, steps: int) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Relative L2 error of each UNet call in each form, and region calls that no graph served.

        The exact form has no regions.
        """
        found, uncompiled = {}, {}
        eager, eager_probe = self.models["eager"]
        for name, (model, probe) in self.ours.items():
            before = int(self.engine.report(model)["calls"]["compiled"])
            found[name] = errors(model, probe, eager, eager_probe, self.kind, size, steps=steps)
            report = self.engine.report(model)
            uncompiled[name] = unserved(report, before, unet_calls=len(found[name]))
        return found, uncompiled

    def captured(self) -> dict[str, Any]:
        """What each form replays."""
        return {
            name: self.engine.report(model)["captured"] for name, (model, _) in self.ours.items()
        }

    def _exact(self) -> tuple[Any, Probe]:
        probe = Probe()
        attached = probe.attach(self.pair.eager)
        return self.engine.compile_model(attached, form="exact"), probe


def forms(
    *,
    model: str,
    kind: str,
    store: str,
    sizes: list[list[int]],
    vae: str = "",
    vae_kind: str = "",
    rounds: int = 4,
    steps: int = 10,
    image_steps: int = 20,
    workers: int = 0,
) -> dict[str, Any]:
    """Time eager, exact and any-shape in turns at every size.

    Args:
        vae: file of a VAE for the time of a whole image at the first size; empty is none.

    Returns:
        {"rows": {size: {form: times, "exact_speedup", "any_shape_speedup", "gpu_bound_speedup"
        (exact / any-shape), "rel_l2", ...}}, "max_rel_l2", "profile", "image_end_to_end"}
    """
    engine = open_engine(Path(store), workers=workers)
    watch = Stopwatch()
    made = Forms(engine, Path(model), kind, Size(*sizes[0]))
    result: dict[str, Any] = {"ready_seconds": round(watch.seconds(), 2), "rows": {}}
    for width, height in sizes:
        size = Size(width, height)
        made.capture(size)
        row = time_pair(
            made.models, kind, size, rounds=rounds, steps=steps, image_steps=image_steps
        )
        for form in made.ours:
            row[f"{form}_speedup"] = ratio(row, "eager", form)
        row["gpu_bound_speedup"] = ratio(row, "exact", "any_shape")
        row["rel_l2"], row["uncompiled"] = made.errors(size, steps=5)
        row["captured"] = made.captured()
        result["rows"][f"{width}x{height}"] = row
        partial(result)
    result["max_rel_l2"] = max(
        max(found) for row in result["rows"].values() for found in row["rel_l2"].values()
    )
    first = Size(*sizes[0])
    if vae:
        result["image_end_to_end"] = _images(
            made, load_vae(Path(vae), vae_kind), first, steps=image_steps
        )
        partial(result)
    result["profile"] = {
        name: kernel_times(functools.partial(sample, model, kind, first, steps=4))
        for name, (model, _) in made.models.items()
    }
    result["report"] = brief(engine.report(made.pair.ours))
    result["given_back_mib"] = _given_back()
    engine.close()
    return result


def batches(
    *,
    model: str,
    kind: str,
    store: str,
    sizes: list[list[int]],
    rounds: int = 2,
    steps: int = 8,
    workers: int = 0,
) -> dict[str, Any]:
    """Time eager, exact and any-shape in turns, by the number of images at once.

    Args:
        sizes: [width, height, batch] in pixels.
    """
    engine = open_engine(Path(store), workers=workers)
    made = Forms(engine, Path(model), kind, Size(*sizes[0]))
    result: dict[str, Any] = {"rows": {}}
    for size in (Size(*each) for each in sizes):
        made.capture(size)
        row = time_pair(made.models, kind, size, rounds=rounds, steps=steps, image_steps=0)
        for form in made.ours:
            row[f"{form}_speedup"] = ratio(row, "eager", form)
        result["rows"][str(size.batch)] = row
        partial(result)
    result["captured"] = made.captured()
    engine.close()
    return result


def _images(made: Forms, eager_vae: Any, size: Size, *, steps: int) -> dict[str, Any]:
    """Wall time of KSampler and VAE Decode together: all the host's, and all ours."""
    our_vae = made.engine.compile_vae(eager_vae, when_missing="wait")
    settle_vae(made.engine, our_vae)
    sides = {
        "eager": (made.models["eager"][0], eager_vae),
        "ours": (made.models["any_shape"][0], our_vae),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(1 + IMAGES):  # the first of each warms it up
        for name, (model, vae) in sides.items():
            watch = Stopwatch()
            vae.decode(sample(model, made.kind, size, steps=steps, seed=turn))
            end_node()
            seconds[name] += [watch.seconds()] if turn else []
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "speedup": round(medians["eager"] / medians["ours"], 3),
        "each": seconds,
        "vae_dtype": str(eager_vae.vae_dtype),
        "vae_report": brief(made.engine.report(our_vae)),
    }


def _given_back() -> float:
    """MiB that the card has again once the host unloads all models."""
    import comfy.model_management

    used = vram_used_mib()
    comfy.model_management.unload_all_models()
    empty_caches()
    return round(used - vram_used_mib())
