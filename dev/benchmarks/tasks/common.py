"""What several tasks do alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..host import Size, conditioning, ksampler, load_unet
from ..measure import Call, Mode, Probe, rel_l2
from ..pack import brief, settle
from ..transformers import is_transformer
from ..transformers import load as load_transformer
from ..transformers import sample as sample_transformer

BUILD_LIMIT_S = 420.0
#: Steps after which a call is captured: the new graphs' first uses are compared, two run cleanly.
CAPTURE_STEPS = 6


def partial(value: dict[str, Any]) -> None:
    """Report what is known so far, for the case that this process is stopped."""
    print(json.dumps({"partial": value}), flush=True)


def load_kind(kind: str, path: Path) -> Any:
    """Load a kind's file as the UNETLoader node does."""
    return load_transformer(kind, path) if is_transformer(kind) else load_unet(path)


def start_libraries(device: Any) -> None:
    """Start the GPU's libraries, as the text encoders do that run before any KSampler."""
    import torch

    dtype = torch.float32 if device.type == "cpu" else torch.float16
    ones = torch.ones(512, 512, device=device, dtype=dtype)
    ones @ ones


def sample(
    model: Any,
    kind: str,
    size: Size,
    *,
    steps: int,
    tokens: int = 77,
    negative_tokens: int | None = None,
    cfg: float | None = None,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> Any:
    """One image's latent with the kind's hand-made conditioning.

    Args:
        cfg: None is 7, or a transformer's own.
        on_step: called at each step's end.
    """
    if is_transformer(kind):
        sides = [size.width, size.height, 1]
        return sample_transformer(
            kind, model, sides, steps=steps, seed=seed, cfg=cfg, on_step=on_step
        )
    positive = conditioning(kind, tokens=tokens, seed=1)
    negative = conditioning(kind, tokens=negative_tokens or tokens, seed=2)
    cfg = 7.0 if cfg is None else cfg
    return ksampler(
        model, positive, negative, size, steps=steps, cfg=cfg, seed=seed, on_step=on_step
    )


class Pair:
    """One loaded file, as the host runs it and through Compile Model, a probe outermost on each."""

    def __init__(
        self,
        engine: Any,
        path: Path,
        *,
        kind: str = "sdxl",
        when_missing: str = "wait",
    ) -> None:
        loaded = load_kind(kind, path)
        self.eager_probe, self.ours_probe = Probe(), Probe()
        self.eager = self.eager_probe.attach(loaded)
        self.source = self.ours_probe.attach(loaded)
        self.compile(engine, when_missing=when_missing)

    def compile(self, engine: Any, *, when_missing: str = "wait") -> None:
        """Compile it by this engine from now on."""
        self.engine = engine
        self.ours = engine.compile_model(self.source, when_missing=when_missing)

    def settle(self, kind: str, size: Size) -> dict[str, Any]:
        """Sample until a step runs all compiled, or nothing is left to wait for; the report."""
        for _ in range(5):
            before = self.compiled_calls()
            sample(self.ours, kind, size, steps=1)
            if unserved(self.engine.report(self.ours), before, unet_calls=1) == 0:
                break
            settle(self.engine, self.ours, limit_s=BUILD_LIMIT_S)
        return brief(self.engine.report(self.ours))

    def compiled_calls(self) -> int:
        """Calls of regions that a graph has served so far."""
        return int(self.engine.report(self.ours)["calls"]["compiled"])


def unserved(report: dict[str, Any], compiled_before: int, *, unet_calls: int) -> int:
    """How many calls of regions no graph served: all that there were, less the compiled ones."""
    compiled = report["calls"]["compiled"] - compiled_before
    return int(report["regions"]["total"] * unet_calls - compiled)


def errors(
    ours: Any,
    ours_probe: Probe,
    eager: Any,
    eager_probe: Probe,
    kind: str,
    size: Size,
    **options: Any,
) -> list[float]:
    """Relative L2 error of each UNet call of ours, against eager calls on the same inputs."""
    return call_errors(
        lambda: sample(ours, kind, size, **options),
        ours_probe,
        lambda: sample(eager, kind, size, **options),
        eager_probe,
    )


def call_errors(
    run_ours: Callable[[], Any],
    ours_probe: Probe,
    run_eager: Callable[[], Any],
    eager_probe: Probe,
    *,
    distance: Callable[[Any, Any], float] = rel_l2,
) -> list[float]:
    """As `errors`, for two runs of any kind that make the same UNet calls, by any distance."""
    ours_probe.start(Mode.RECORD)
    run_ours()
    recorded: list[Call] = ours_probe.calls
    ours_probe.start(Mode.OFF)
    if not recorded:
        raise RuntimeError("the run of ours must pass the probe, got no UNet call")
    eager_probe.start(Mode.REPLAY, recorded)
    run_eager()
    reference = eager_probe.calls
    eager_probe.start(Mode.OFF)
    if len(reference) != len(recorded):
        raise RuntimeError(f"{len(recorded)} calls were recorded, {len(reference)} replayed")
    return [
        distance(call.output, expected.output)
        for call, expected in zip(recorded, reference, strict=True)
    ]
