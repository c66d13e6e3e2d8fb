"""`torch.compile` of the whole model, as the host's TorchCompileModel node does, beside eager."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..host import Size, load_unet
from ..measure import Probe, Stopwatch
from .common import partial, sample
from .speed import ratio, time_pair


def rival(
    *,
    model: str,
    kind: str,
    sizes: list[list[int]],
    dynamic: bool,
    rounds: int = 4,
    steps: int = 8,
) -> dict[str, Any]:
    """Compile, then time against eager in this process; a size's first run is its compile time.

    The parent stops this process at its limit; what was known then is in the partial lines.
    """
    loaded = load_unet(Path(model))
    eager_probe, rival_probe = Probe(), Probe()
    eager = eager_probe.attach(loaded)
    clone = torch_compiled(rival_probe.attach(loaded), dynamic=dynamic)
    result: dict[str, Any] = {"dynamic": dynamic, "rows": {}}
    for width, height in sizes:
        size = Size(width, height)
        partial({**result, "compiling": f"{width}x{height}"})
        watch = Stopwatch()
        sample(clone, kind, size, steps=1)
        compile_seconds = round(watch.seconds(), 2)
        partial({**result, "compile_seconds": compile_seconds, "compiling": f"{width}x{height}"})
        models = {"eager": (eager, eager_probe), "torch_compile": (clone, rival_probe)}
        row = time_pair(models, kind, size, rounds=rounds, steps=steps, image_steps=0)
        row["compile_seconds"] = compile_seconds
        row["speedup"] = ratio(row, "eager", "torch_compile")
        result["rows"][f"{width}x{height}"] = row
        partial(result)
    return result


def torch_compiled(loaded: Any, *, dynamic: bool, options: Mapping[str, Any] | None = None) -> Any:
    """A clone that the host's TorchCompileModel node would return, without dynamic VRAM.

    The node takes no `dynamic` and no more `options`; they go to the host's helper beneath it.
    """
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    clone = without_dynamic(loaded)
    set_torch_compile_wrapper(
        clone,
        backend="inductor",
        dynamic=dynamic,
        options={"guard_filter_fn": skip_transformer_options, **(options or {})},
    )
    return clone


def without_dynamic(loaded: Any) -> Any:
    """A clone whose weights the host holds in the old way."""
    try:
        return loaded.clone(disable_dynamic=True)
    except TypeError:  # hosts before dynamic VRAM
        return loaded.clone()


def skip_transformer_options(guards: Any) -> list[bool]:
    """Which guards to keep: none on the dictionary that is new at every call."""
    return ["transformer_options" not in guard.name for guard in guards]
