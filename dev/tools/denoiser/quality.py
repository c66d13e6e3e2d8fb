"""Measure what caches do to the denoiser's images, each against the run without one.

`python -m dev.tools.denoiser.quality --host TREE --out JSON --sheet PNG`. All is sampled by the
host's own code. This UNet is so small that a GPU's time is Python's: ways are compared at equal
*work*, the share of the plain run's arithmetic that they do, and the time is noted beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from .host import import_host
from .images import contact_sheet, psnr, ssim
from .pictures import CLASSES, SIZE

FILE = Path(__file__).with_name("denoiser.safetensors")
SAMPLERS = {
    "euler": "normal",
    "dpmpp_2m": "normal",
    "euler_ancestral": "normal",
    "ddim": "ddim_uniform",  # else it would be euler
    "heun": "normal",
}
"""Samplers that are measured, each with its scheduler."""
INTERVALS = (2, 3, 5)
_THRESHOLDS = 0.005, 3.0  # the most is what the host's nodes take
_HALVINGS = 8
D = TypeVar("D")
_SHEET = (
    ("uniform", 3),
    ("quadratic early", 3),
    ("adaptive", 3),
    ("EasyCache", 3),
    ("LazyCache", 3),
    ("uniform", 5),
)


class Task(NamedTuple):
    """What is drawn, and how: every class with every seed.

    Attributes:
        batch: pictures a run.
    """

    sampler: str = "euler"
    classes: Sequence[int] = tuple(range(len(CLASSES)))
    seeds: Sequence[int] = (1, 2, 3, 4)
    steps: int = 20
    cfg: float = 4.0
    batch: int = 40


class Drawn(NamedTuple):
    """Pictures [N, SIZE, SIZE, 3], 0 to 1, on the CPU, seed by seed; and what they took.

    Attributes:
        full, shallow: calls of the UNet.
        seconds: of one run, on average.
    """

    pictures: torch.Tensor
    full: int
    shallow: int
    seconds: float


class Row(NamedTuple):
    """One way to save work, with one sampler.

    Attributes:
        way: a key of `BY_INTERVAL` or `BY_THRESHOLD`.
        interval: full steps are so far apart; by threshold, work is about that of "uniform" so.
        branch: where DeepCache cuts the UNet; as with `interval`.
        threshold: None of a way by interval.
        psnr, lowest_psnr: dB, mean and least of the pictures.
        ssim: mean of the pictures.
        work: arithmetic of the UNet, as a share of the plain run's.
        full, shallow, plain: calls of the UNet, and those of the plain run.
        seconds, plain_seconds: of one run.
    """

    sampler: str
    way: str
    interval: int
    branch: int
    threshold: float | None
    psnr: float
    lowest_psnr: float
    ssim: float
    work: float
    full: int
    shallow: int
    plain: int
    seconds: float
    plain_seconds: float


def load(file: Path) -> Any:
    """Load the denoiser as the host's UNETLoader node does."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(file))


@torch.no_grad()
def draw(model: Any, task: Task) -> Drawn:
    """Draw all pictures of a task by the host's sampling."""
    from warmgraph_backends.attaching.deepcache import carried

    from .arch import to_pictures

    model, calls = _counted(model)
    cache = carried(model)
    before = cache.evaluations.copy() if cache else {}
    wanted = [(kind, seed) for seed in task.seeds for kind in task.classes]
    batches = [wanted[n : n + task.batch] for n in range(0, len(wanted), task.batch)]
    begin = time.perf_counter()
    latents = torch.cat([_sample(model, task, batch) for batch in batches])
    seconds = (time.perf_counter() - begin) / len(batches)
    full, shallow = len(calls), 0
    if cache:
        if cache.problem:
            raise RuntimeError(f"DeepCache must run to be measured, got: {cache.problem}")
        full, shallow = (cache.evaluations[k] - before[k] for k in ("full", "shallow"))
    return Drawn(to_pictures(latents), full, shallow, seconds)


def _sample(model: Any, task: Task, batch: Sequence[tuple[int, int]]) -> torch.Tensor:
    """One run; a picture's first noise depends on its class and seed alone."""
    import comfy.sample

    from .arch import UNCONDITIONAL, conditioning

    empty = torch.zeros(1, 4, SIZE, SIZE)
    noise = [comfy.sample.prepare_noise(empty, 1000 * seed + kind) for kind, seed in batch]
    latents: torch.Tensor = comfy.sample.sample(
        model,
        torch.cat(noise),
        task.steps,
        task.cfg,
        task.sampler,
        SAMPLERS[task.sampler],
        conditioning([kind for kind, _ in batch]),
        conditioning([UNCONDITIONAL] * len(batch)),
        empty.repeat(len(batch), 1, 1, 1),
        disable_pbar=True,
        seed=batch[0][1],
    )
    return latents.cpu()


def _counted(model: Any) -> tuple[Any, list[None]]:
    """A clone, and a list that grows by one at each call that reaches its UNet.

    A DeepCache counts by itself, and knows that nothing else lies within it.
    """
    from comfy.patcher_extension import WrappersMP

    from warmgraph_backends.attaching.deepcache import carried

    calls: list[None] = []

    def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return executor(*args, **kwargs)

    clone = model.clone()
    if carried(model) is None:
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "denoiser.count", count)
    return clone, calls


# --- ways to save work ----------------------------------------------------------------------------


def deepcache(model: Any, schedule: str, **options: Any) -> Any:
    """Return a clone under DeepCache; options as of `DeepCacheOptions`; the schedule by name."""
    from warmgraph_backends.attaching.deepcache import apply
    from warmgraph_backends.deepcache.run import DeepCacheOptions
    from warmgraph_backends.deepcache.schedule import Schedule
    from warmgraph_backends.events import Events

    chosen = DeepCacheOptions(schedule=Schedule(schedule), **options)
    return apply(model, chosen, Events(), identifier="deepcache")[0]


def adaptive(model: Any, threshold: float, branch: int) -> Any:
    """Return a clone under DeepCache that chooses its steps by threshold."""
    return deepcache(model, "adaptive", threshold=threshold, branch=branch)


def easycache(model: Any, threshold: float, _branch: int) -> Any:
    """Return a clone under the host's EasyCache, otherwise as its node is by default."""
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, threshold, 0.15, 0.95, False).args[0]


def lazycache(model: Any, threshold: float, _branch: int) -> Any:
    """Return a clone under the host's LazyCache, otherwise as its node is by default."""
    from comfy_extras.nodes_easycache import LazyCacheNode

    return LazyCacheNode.execute(model, threshold, 0.15, 0.95, False).args[0]


BY_INTERVAL: dict[str, dict[str, Any]] = {
    "uniform": {"schedule": "uniform"},
    "quadratic": {"schedule": "quadratic", "center": 0.3, "power": 1.4},
    "quadratic early": {"schedule": "quadratic", "center": 0.0, "power": 1.2},
    "quadratic mild": {"schedule": "quadratic", "center": 0.15, "power": 1.2},
}
"""DeepCache's schedules with an interval, and their options; "quadratic early" is the node's."""
BY_THRESHOLD: dict[str, Callable[[Any, float, int], Any]] = {
    "adaptive": adaptive,
    "EasyCache": easycache,
    "LazyCache": lazycache,
}
"""Ways that choose their steps while they run."""


def outer_share(branch: int) -> float:
    """Return a shallow call's arithmetic as a share of a full one's, counted by operation."""
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from torch.utils.flop_counter import FlopCounterMode

    from warmgraph_backends.deepcache.branches import Branch

    from .arch import CONFIG, CONTEXT

    with torch.device("meta"):
        unet = UNetModel(**CONFIG, device="meta", operations=comfy.ops.disable_weight_init)
        inputs = torch.zeros(1, 4, SIZE, SIZE), torch.zeros(1), torch.zeros(1, 2, CONTEXT)
    cut = Branch(unet, branch)
    with FlopCounterMode(display=False) as whole:
        _, feature = cut.full(*inputs, transformer_options={})
    with FlopCounterMode(display=False) as outer:
        cut.shallow(*inputs, transformer_options={}, feature=feature)
    return outer.get_total_flops() / whole.get_total_flops()


def nearest(
    draw_at: Callable[[float], D],
    more: Callable[[D], float],
    tolerance: float,
    halvings: int = _HALVINGS,
) -> tuple[float, D]:
    """Return the threshold whose work comes nearest to what is wanted, and what was drawn at it; of
    several the lowest, which is the kindest to the image.

    Args:
        more: by how much what was drawn took more work than is wanted, as a share.
        tolerance: so much more counts as equal.
        halvings: thresholds that are tried.
    """
    low, high = _THRESHOLDS
    tried: list[tuple[float, float, D]] = []
    for _ in range(halvings):
        threshold = math.sqrt(low * high)
        drawn = draw_at(threshold)
        over = more(drawn)
        tried.append((round(abs(over), 6), threshold, drawn))
        low, high = (threshold, high) if over > tolerance else (low, threshold)
    _, threshold, drawn = min(tried, key=lambda one: one[:2])
    return threshold, drawn


# --- measuring ------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """A row and the pictures that it is about."""

    row: Row
    pictures: torch.Tensor


class Bench:
    """Measures ways against the plain run of one task.

    Attributes:
        plain: what the model draws without a cache.
    """

    def __init__(self, model: Any, task: Task) -> None:
        self.plain = draw(model, task)
        self._model, self._task = model, task

    def by_interval(self, way: str, interval: int, branch: int) -> Measured:
        """Measure a way of `BY_INTERVAL`."""
        made = deepcache(self._model, **BY_INTERVAL[way], interval=interval, branch=branch)
        return self._measured(draw(made, self._task), way, interval, branch, None)

    def at_work(self, way: str, uniform: Row) -> Measured:
        """Measure a way of `BY_THRESHOLD` at the work of another row, or as near as it comes.

        Of the thresholds that do, it is given the lowest, which is the kindest to the image.
        """
        share = outer_share(uniform.branch)
        threshold, drawn = nearest(
            lambda threshold: draw(
                BY_THRESHOLD[way](self._model, threshold, uniform.branch), self._task
            ),
            lambda drawn: self._work(drawn, share) - uniform.work,
            0.5 / self.plain.full,
        )
        return self._measured(drawn, way, uniform.interval, uniform.branch, threshold)

    def _work(self, drawn: Drawn, share: float) -> float:
        return (drawn.full + share * drawn.shallow) / self.plain.full

    def _measured(
        self, drawn: Drawn, way: str, interval: int, branch: int, threshold: float | None
    ) -> Measured:
        noise = psnr(drawn.pictures, self.plain.pictures)
        row = Row(
            sampler=self._task.sampler,
            way=way,
            interval=interval,
            branch=branch,
            threshold=threshold,
            psnr=float(noise.mean()),
            lowest_psnr=float(noise.min()),
            ssim=float(ssim(drawn.pictures, self.plain.pictures).mean()),
            work=self._work(drawn, outer_share(branch)),
            full=drawn.full,
            shallow=drawn.shallow,
            plain=self.plain.full,
            seconds=drawn.seconds,
            plain_seconds=self.plain.seconds,
        )
        return Measured(row, drawn.pictures)


def measure(
    bench: Bench, *, intervals: Sequence[int] = INTERVALS, branches: Sequence[int] = (0,)
) -> Iterator[Measured]:
    """Measure every way of one task, one after the other."""
    for branch in branches:
        for interval in intervals:
            found = [bench.by_interval(way, interval, branch) for way in BY_INTERVAL]
            yield from found
            for way in BY_THRESHOLD:
                if branch == branches[0] or way == "adaptive":  # the host's know no branches
                    yield bench.at_work(way, found[0].row)


def write(file: Path, name: str, rows: Sequence[Any], facts: dict[str, Any]) -> None:
    """Write rows as a result of the benchmarks, with what they were measured on.

    Args:
        rows: NamedTuples.
        facts: of these rows, besides.
    """
    import comfyui_version

    document = {
        "name": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "host": f"ComfyUI {comfyui_version.__version__}",
        "ok": True,
        **facts,
        "rows": [row._asdict() for row in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")


def _line(row: Row) -> str:
    threshold = "" if row.threshold is None else f"  threshold {row.threshold:.3f}"
    return (
        f"{row.sampler:16}{row.way:16}{row.interval:2}{row.branch:3}  work {row.work:.2f}  "
        f"PSNR {row.psnr:5.2f} ({row.lowest_psnr:5.2f})  SSIM {row.ssim:.4f}  "
        f"{row.full:3} + {row.shallow:3} of {row.plain:3}  "
        f"{row.seconds:.2f} of {row.plain_seconds:.2f} s{threshold}"
    )


def main() -> None:
    """Measure, print a line for each row, and write the rows and a sheet of pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", type=Path, required=True, help="the ComfyUI tree")
    parser.add_argument("--file", type=Path, default=FILE, help="default: the shipped weights")
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--sheet", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--samplers", nargs="+", choices=list(SAMPLERS), default=list(SAMPLERS))
    parser.add_argument("--intervals", nargs="+", type=int, default=list(INTERVALS))
    parser.add_argument("--branches", nargs="+", type=int, default=[0])
    parser.add_argument("--classes", type=int, default=len(CLASSES), help="how many")
    parser.add_argument("--seeds", type=int, default=4, help="how many pictures of each class")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=40, help="pictures a run")
    options = parser.parse_args()

    from ...benchmarks.pack import ROOT, import_alias

    import_host(options.host, cpu=not torch.cuda.is_available())
    import_alias("warmgraph_backends", ROOT / "backends")
    model = load(options.file)
    classes, seeds = tuple(range(options.classes)), tuple(range(1, options.seeds + 1))
    rows: list[Row] = []
    for sampler in options.samplers:
        task = Task(sampler, classes, seeds, steps=options.steps, batch=options.batch)
        if not rows:
            draw(model, task._replace(steps=3))  # loads the weights, and chooses kernels
        bench = Bench(model, task)
        columns = {"plain": bench.plain.pictures[: len(classes)]}
        for row, pictures in measure(bench, intervals=options.intervals, branches=options.branches):
            print(_line(row), flush=True)
            rows.append(row)
            if (row.way, row.interval) in _SHEET and row.branch == options.branches[0]:
                label = f"{row.way} {row.interval}\n{row.psnr:.1f} dB, work {row.work:.2f}"
                columns[label] = pictures[: len(classes)]
        if sampler == options.samplers[0]:
            contact_sheet(columns, [CLASSES[kind] for kind in classes], options.sheet)
    facts = {
        "dtype": str(model.model.get_dtype_inference()),
        "task": task._replace(sampler="all")._asdict(),
        "outer_share": {branch: outer_share(branch) for branch in options.branches},
    }
    write(options.out, "deepcache_quality", rows, facts)


if __name__ == "__main__":
    main()
