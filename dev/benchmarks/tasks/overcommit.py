"""More weights and activations than the VRAM holds: a UNet with its control, and a VAE.

The GPU tests (`tests/gpu`) assert on what these return. Graphs are built by an engine of their own
before anything is measured: a worker that came or went meanwhile would change what room there is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..host import Size, load_controlnet, load_vae
from ..measure import MIB, rel_l2
from ..pack import brief, open_engine
from .common import Pair, call_errors, partial, unserved
from .control import Side, compiled_calls, control_errors, random_hint, settle_control
from .residency import empty_caches, vram_left
from .vae import served_calls, settle_vae, vae_input

CFG = 1.0  # one prompt: how many the host puts into one call would depend on the room there is
_TILED = ("decode_tiled_", "encode_tiled_")
_DECODE_TILES = ((64, 64), (32, 128), (128, 32))  # of latent, as the host's fallback takes them
_DECODE_OVERLAP = 16


def controls_overcommitted(
    *,
    model: str,
    controls: dict[str, str],
    kind: str,
    store: str,
    size: list[int],
    leave_mib: dict[str, int | None],
    steps: int = 2,
    captured: bool = False,
    workers: int = 0,
) -> dict[str, Any]:
    """A UNet under one control after another, ours against eager on the same inputs, in phases.

    Args:
        controls: files by name.
        leave_mib: how much VRAM each phase leaves to models and activations; None is all of it.

    Returns:
        {phase: {control: {"unet_rel_l2", "control_rel_l2", "calls", "eager_calls", "loaded_mib",
        "model_mib", "reports"}}}; but for the errors, each {"unet", "control"}.
    """
    target = Size(*size)
    files = {name: load_controlnet(Path(path)) for name, path in controls.items()}
    with opened(store, workers, captured) as engine:
        pair = Pair(engine, Path(model))
        for plain in files.values():
            _Steered(engine, pair, plain, kind, target).settle()
    phases: dict[str, dict[str, Any]] = {}
    with opened(store, workers, captured) as engine:
        pair.compile(engine)
        steered = {
            name: _Steered(engine, pair, plain, kind, target) for name, plain in files.items()
        }
        for each in steered.values():
            each.settle()
        patchers = [pair.ours, *(each.patcher for each in steered.values() if each.patcher)]
        for phase, leave in leave_mib.items():
            phases[phase] = {}
            with vram_left(patchers, leave):
                for name, each in steered.items():
                    phases[phase][name] = each.measure(steps)
                    partial(phases)
    return phases


class _Steered:
    """One control over a pair of models: as the host runs both, and compiled."""

    def __init__(self, engine: Any, pair: Pair, plain: Any, kind: str, size: Size) -> None:
        self.engine, self.pair, self.size = engine, pair, size
        self.patcher = getattr(plain, "control_model_wrapped", None)  # a ControlLoRA has none
        self.control = engine.compile_controlnet(plain, when_missing="wait")
        hint = random_hint(size)
        self.sides = {
            "eager": Side(pair.eager, pair.eager_probe, plain, kind, hint, cfg=CFG),
            "ours": Side(pair.ours, pair.ours_probe, self.control, kind, hint, cfg=CFG),
        }

    def settle(self) -> None:
        settle_control(self.engine, self.pair, self.control, self.sides["ours"], self.size)

    def measure(self, steps: int) -> dict[str, Any]:
        eager, ours = self.sides["eager"], self.sides["ours"]
        ours.sample(self.size, steps=1)  # weights of a new class are compared at their first call
        before = compiled_calls(self.engine, self.pair, self.control)
        control = control_errors(self.sides, self.size)
        unet = call_errors(
            lambda: ours.sample(self.size, steps=steps),
            ours.probe,
            lambda: eager.sample(self.size, steps=steps),
            eager.probe,
        )
        reports = {
            "unet": self.engine.report(self.pair.ours),
            "control": self.engine.report(self.control),
        }
        patchers = {"unet": self.pair.ours, "control": self.patcher}
        calls = 1 + len(unet)  # the one of `control_errors` too
        return {
            "unet_rel_l2": max(unet),
            "control_rel_l2": control["max"],
            "calls": {
                name: report["calls"]["compiled"] - before[name] for name, report in reports.items()
            },
            "eager_calls": {
                name: unserved(report, before[name], unet_calls=calls)
                for name, report in reports.items()
            },
            "loaded_mib": {n: round(p.loaded_size() / MIB) for n, p in patchers.items() if p},
            "model_mib": {n: round(p.model_size() / MIB) for n, p in patchers.items() if p},
            "reports": {name: brief(report) for name, report in reports.items()},
        }


def vae_overcommitted(
    *,
    model: str,
    kind: str,
    store: str,
    phases: dict[str, dict[str, Any]],
    captured: bool = False,
    workers: int = 0,
) -> dict[str, Any]:
    """Decode and encode with less and less VRAM, ours against eager.

    Args:
        phases: {"leave_mib": what is left to the VAE and its activations, None is all of it;
            "works": [["decode" or "encode", width, height]]} by name.

    Returns:
        {phase: {"decode WxH": {"rel_l2", "tiled": {"eager", "ours"}, "calls", "eager_calls"}}};
        "tiled" is how often memory ran out, and the host took tiles.
    """
    plain = load_vae(Path(model), kind)
    with opened(store, workers, captured) as engine:
        settle_vae(engine, engine.compile_vae(plain, when_missing="wait"))
    result: dict[str, Any] = {}
    with opened(store, workers, captured) as engine:
        ours = engine.compile_vae(plain, when_missing="wait")
        regions = settle_vae(engine, ours)
        tiles = {
            "eager": _Tiles(plain, lambda: 0),
            "ours": _Tiles(ours, lambda: served_calls(engine, ours)),
        }
        for phase, plan in phases.items():
            rows = result[phase] = {}
            with vram_left([plain.patcher], plan["leave_mib"]):
                for work, width, height in plan["works"]:
                    rows[f"{work} {width}x{height}"] = _vae_row(
                        engine, plain, ours, tiles, work, Size(width, height), regions[work]
                    )
                    partial(result)
        result["report"] = brief(engine.report(ours))
    return result


def _vae_row(
    engine: Any,
    plain: Any,
    ours: Any,
    tiles: dict[str, _Tiles],
    work: str,
    size: Size,
    regions: int,
) -> dict[str, Any]:
    given = vae_input(plain, work, size.width, size.height)
    getattr(ours, work)(given)  # weights of a new class are compared at their first call
    outputs = {}
    for name, vae in (("ours", ours), ("eager", plain)):
        tiles[name].restart()
        empty_caches()
        before = served_calls(engine, ours)
        outputs[name] = getattr(vae, work)(given)
        if name == "ours":
            calls = served_calls(engine, ours) - before
    expected, served = regions, calls
    if tiles["ours"].runs:
        expected, served = regions * _decode_tiles(size), tiles["ours"].served
    return {
        "rel_l2": rel_l2(outputs["ours"], outputs["eager"]),
        "tiled": {name: found.runs for name, found in tiles.items()},
        "calls": calls,
        "eager_calls": expected - served,
    }


class _Tiles:
    """Counts how often a VAE falls back on tiles, and the calls that graphs serve meanwhile."""

    def __init__(self, vae: Any, count: Callable[[], int]) -> None:
        self._count = count
        self.restart()
        for name in _TILED:
            vars(vae)[name] = self._around(getattr(vae, name))

    def restart(self) -> None:
        self.runs = self.served = 0

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self._count()
            result = method(*args, **kwargs)
            self.runs += 1
            self.served += self._count() - before
            return result

        return counted


def _decode_tiles(size: Size) -> int:
    """How many tiles the host's fallback decodes of an image."""
    from comfy.utils import get_tiled_scale_steps

    latent = (size.width // 8, size.height // 8)
    return sum(
        int(get_tiled_scale_steps(*latent, *tile, _DECODE_OVERLAP)) for tile in _DECODE_TILES
    )


@contextlib.contextmanager
def opened(store: str, workers: int, captured: bool) -> Iterator[Any]:
    """An engine for as long as this lasts."""
    engine = open_engine(Path(store), workers=workers, captured=captured)
    try:
        yield engine
    finally:
        engine.close()
