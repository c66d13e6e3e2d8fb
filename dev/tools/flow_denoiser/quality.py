"""Measure what Step Cache does to images, each against the run that computes all of its steps.

`python -m dev.tools.flow_denoiser.quality --host TREE --out JSON --sheet PNG`. All is sampled by
the host's own code, on the two small transformers and on the UNet of `dev.tools.denoiser`. Ways are
compared at equal *work*: the share of the plain run's calls of the model that they make.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..denoiser import quality as unet
from ..denoiser.host import import_host
from ..denoiser.images import contact_sheet, psnr, ssim
from .data import SORTS

HERE = Path(__file__).parent
UNET = "drawings"
SAMPLERS = ("euler", "dpmpp_2m", "er_sde", "euler_ancestral", "res_multistep", "heun")
TWICE = ("heun",)
"""Samplers that look at a step's end, too: at which step a call is, sigma does not tell."""
STEPS = 24
FORECASTS = ("auto", "half", "line", "reuse")
DEFAULT = "auto"
WAYS = ("fewer", "easycache", "deepcache", "stepcache")
_HALVINGS = 9
_SHEET = ("fewer steps", "EasyCache", DEFAULT)
_SHEET_PIXELS = 64  # of a picture, at least


class Task(NamedTuple):
    """What is drawn, and how: every class with every seed, in one batch.

    Attributes:
        cfg: guidance; None is what the model was looked at with.
    """

    model: str = "digits"
    sampler: str = "euler"
    steps: int = STEPS
    seeds: Sequence[int] = (1, 2)
    cfg: float | None = None


class Drawn(NamedTuple):
    """What came of a run.

    Attributes:
        pictures: [N, H, W, 3], 0 to 1.
        calls: of the model, by the images in them.
        sigmas: at which they were, each once, in order.
    """

    pictures: torch.Tensor
    calls: int
    sigmas: tuple[float, ...] = ()


class Row(NamedTuple):
    """One way to save work.

    Attributes:
        way: "fewer steps", "EasyCache", "DeepCache", or a forecast of Step Cache, behind which
            stands what is not as by default.
        speed: steps for each computed one that the way was to come to.
        work: calls of the model as a share of the plain run's.
        threshold: of EasyCache, at which it came nearest.
        psnr, lowest_psnr: dB to the plain run, mean and least of the pictures.
        ssim: mean of the pictures.
    """

    model: str
    sampler: str
    steps: int
    way: str
    speed: float
    work: float
    psnr: float
    lowest_psnr: float
    ssim: float
    threshold: float | None = None


class Model:
    """One of the models, and how it is told what to draw."""

    def __init__(self, name: str, patcher: Any) -> None:
        """Args: its name, and a MODEL of the host's."""
        self.name, self.patcher = name, patcher
        self.is_unet = name == UNET
        self.cfg, self.scheduler = (4.0, "normal") if self.is_unet else (2.5, "simple")

    @classmethod
    def load(cls, name: str, file: Path | None = None) -> Model:
        """Load a shipped model, or a file like it."""
        shipped = unet.FILE if name == UNET else HERE / f"{name}.safetensors"
        if name != UNET:
            from . import arch  # noqa: F401  registers by being imported
        return cls(name, unet.load(file or shipped))

    def wanted(self, seeds: Sequence[int]) -> list[tuple[int, int]]:
        """Classes and seeds of a batch."""
        classes = unet.CLASSES if self.is_unet else SORTS[self.name].classes
        return [(kind, seed) for seed in seeds for kind in range(len(classes))]

    def sample(self, patcher: Any, task: Task) -> torch.Tensor:
        """Return the pictures of a run; one's first noise depends on its class and seed alone."""
        import comfy.sample

        from ..denoiser import arch as drawings
        from . import arch

        if self.is_unet:
            none, shape = drawings.UNCONDITIONAL, (1, 4, unet.SIZE, unet.SIZE)
            conditioning, to_pictures = drawings.conditioning, drawings.to_pictures
        else:
            sort = SORTS[self.name]
            none, shape = sort.none, (1, sort.channels, sort.size, sort.size)
            conditioning, to_pictures = arch.conditioning, arch.to_pictures
        wanted, empty = self.wanted(task.seeds), torch.zeros(shape)
        noise = [comfy.sample.prepare_noise(empty, 1000 * seed + kind) for kind, seed in wanted]
        latents = comfy.sample.sample(
            patcher,
            torch.cat(noise),
            task.steps,
            self.cfg if task.cfg is None else task.cfg,
            task.sampler,
            self.scheduler,
            conditioning([kind for kind, _ in wanted]),
            conditioning([none] * len(wanted)),
            empty.repeat(len(wanted), 1, 1, 1),
            disable_pbar=True,
            seed=7,
        )
        return to_pictures(latents.cpu())


@torch.no_grad()
def draw(model: Model, task: Task, patcher: Any = None) -> Drawn:
    """Draw a task, by the model itself or under what a clone of it carries."""
    from comfy.patcher_extension import WrappersMP

    calls: list[int] = []
    sigmas: dict[float, None] = {}

    def count(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(x))
        (options,) = (v for v in (*args, *kwargs.values()) if isinstance(v, dict) and "sigmas" in v)
        sigmas[float(options["sigmas"][0])] = None
        return executor(x, *args, **kwargs)

    clone = (patcher or model.patcher).clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "quality.count", count)  # innermost
    pictures = model.sample(clone, task)
    return Drawn(pictures, sum(calls), tuple(sigmas))


# --- ways to save work ----------------------------------------------------------------------------


def step_cache(model: Model, speed: float, forecast: str, **options: Any) -> Any:
    """Return a clone under Step Cache; options as of its `StepCacheOptions`."""
    from warmgraph_backends.attaching.stepcache import apply
    from warmgraph_backends.events import Events
    from warmgraph_backends.stepcache.forecast import Forecast
    from warmgraph_backends.stepcache.run import StepCacheOptions

    chosen = StepCacheOptions(speed=speed, forecast=Forecast(forecast), **options)
    return apply(model.patcher, chosen, Events(), identifier="stepcache")[0]


def easycache(model: Model, threshold: float) -> Any:
    """Return a clone under the host's EasyCache at its kindest.

    It writes into the latent that it is given, which is the sampler's own in float32: it is given a
    copy. Of a latent it looks at each 8th pixel either way, which leaves too little of one as small
    as here: it looks at all.
    """
    from comfy.patcher_extension import WrappersMP
    from comfy_extras.nodes_easycache import EasyCacheNode

    def copied(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return executor(x.clone(), *args, **kwargs)

    clone = model.patcher.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "quality.copied", copied)
    found = EasyCacheNode.execute(clone, threshold, 0.15, 0.95, False).args[0]
    found.model_options["transformer_options"]["easycache"].subsample_factor = 1
    return found


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

    def __init__(self, model: Model, task: Task) -> None:
        self.plain = draw(model, task)
        self._model, self._task = model, task
        self._found: dict[float, tuple[float, Drawn]] = {}  # EasyCache's, by speed

    def step_cache(self, speed: float, forecast: str, **options: Any) -> Measured:
        """Measure Step Cache; options as of its `StepCacheOptions`."""
        made = step_cache(self._model, speed, forecast, **options)
        words = [forecast, *(f"{name} {_word(value)}" for name, value in options.items())]
        return self._measured(draw(self._model, self._task, made), ", ".join(words), speed)

    def fewer_steps(self, speed: float) -> Measured:
        """Measure a plain run of as many steps as Step Cache computes."""
        from warmgraph_backends.stepcache.run import StepCacheOptions
        from warmgraph_backends.stepcache.schedule import count

        fewer = count(self._task.steps, speed, StepCacheOptions().first_full)
        return self._measured(
            draw(self._model, self._task._replace(steps=fewer)), "fewer steps", speed
        )

    def easycache(self, speed: float, threshold: float | None = None) -> Measured:
        """Measure the host's EasyCache at the threshold that comes nearest to that work, or at one.

        Of the thresholds that do, it is given the lowest, which is the kindest to the image.
        """
        if threshold is None:
            found, drawn = self._easycache(speed)
        else:
            found, drawn = threshold, self._easycache_at(threshold)
        return self._measured(drawn, "EasyCache", speed, found)

    def _easycache_at(self, threshold: float) -> Drawn:
        return draw(self._model, self._task, easycache(self._model, threshold))

    def _easycache(self, speed: float) -> tuple[float, Drawn]:
        """EasyCache's threshold and run that come nearest to that work."""
        if speed not in self._found:
            steps = self._task.steps
            wanted = round(steps / speed) / steps
            self._found[speed] = unet.nearest(
                self._easycache_at,
                lambda drawn: self._work(drawn) - wanted,
                0.5 / steps,
                _HALVINGS,
            )
        return self._found[speed]

    def as_easycache(self, speed: float) -> Measured:
        """Measure Step Cache with the steps that EasyCache chose while it ran at that work."""
        from warmgraph_backends.stepcache.schedule import Schedule

        _, chosen = self._easycache(speed)
        all_sigmas = self.plain.sigmas
        steps = tuple(  # a sampler on a GPU need not come to a sigma's very bits twice
            min(range(len(all_sigmas)), key=lambda at: abs(all_sigmas[at] - sigma))
            for sigma in chosen.sigmas
        )
        options = {"schedule": Schedule.CUSTOM, "full_steps": steps, "first_full": 2}
        made = step_cache(self._model, speed, DEFAULT, **options)
        drawn = draw(self._model, self._task, made)
        return self._measured(drawn, f"{DEFAULT}, EasyCache's steps", speed)

    def deepcache(self, speed: float) -> Measured:
        """Measure DeepCache at the interval that comes nearest to that work; of a UNet."""
        from warmgraph_backends.attaching.deepcache import carried

        share = unet.outer_share(0)
        works = {n: 1 / n + (1 - 1 / n) * share for n in range(2, 9)}
        interval = min(works, key=lambda n: abs(works[n] - 1 / speed))
        schedule = unet.BY_INTERVAL["quadratic early"]
        made = unet.deepcache(self._model.patcher, **schedule, interval=interval, branch=0)
        cache, pictures = carried(made), self._model.sample(made, self._task)
        if cache is None or cache.problem:
            raise RuntimeError(f"DeepCache must run to be measured, got: {cache and cache.problem}")
        full, shallow = cache.evaluations["full"], cache.evaluations["shallow"]
        work = (full + share * shallow) / (full + shallow)
        return self._measured(Drawn(pictures, round(work * self.plain.calls)), "DeepCache", speed)

    def _work(self, drawn: Drawn) -> float:
        return drawn.calls / self.plain.calls

    def _measured(
        self, drawn: Drawn, way: str, speed: float, threshold: float | None = None
    ) -> Measured:
        noise = psnr(drawn.pictures, self.plain.pictures)
        row = Row(
            model=self._model.name,
            sampler=self._task.sampler,
            steps=self._task.steps,
            way=way,
            speed=speed,
            work=round(self._work(drawn), 3),
            psnr=round(float(noise.mean()), 2),
            lowest_psnr=round(float(noise.min()), 2),
            ssim=round(float(ssim(drawn.pictures, self.plain.pictures).mean()), 4),
            threshold=None if threshold is None else round(threshold, 4),
        )
        return Measured(row, drawn.pictures)


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def measure(
    bench: Bench,
    sampler: str,
    speeds: Sequence[float],
    *,
    is_unet: bool,
    ways: Sequence[str] = WAYS,
) -> Iterator[Measured]:
    """Measure ways of one task at each speed, one after the other."""
    from warmgraph_backends.stepcache.schedule import Schedule

    for speed in speeds:
        if "fewer" in ways:
            yield bench.fewer_steps(speed)
        if "easycache" in ways:
            yield bench.easycache(speed)
        if "deepcache" in ways and is_unet:
            yield bench.deepcache(speed)
        if "stepcache" not in ways:
            continue
        for forecast in FORECASTS:
            yield bench.step_cache(speed, forecast)
        yield bench.step_cache(speed, DEFAULT, schedule=Schedule.UNIFORM)
        if "easycache" in ways and sampler not in TWICE:
            yield bench.as_easycache(speed)


def line(row: Row) -> str:
    """A row for a terminal."""
    threshold = "" if row.threshold is None else f"  threshold {row.threshold:.3f}"
    return (
        f"{row.model:9}{row.sampler:16}{row.steps:3}  {row.way:24}{row.speed:5.2f}x  "
        f"work {row.work:.2f}  PSNR {row.psnr:5.2f} ({row.lowest_psnr:5.2f})  "
        f"SSIM {row.ssim:.4f}{threshold}"
    )


def main() -> None:
    """Measure, print a line for each row, and write the rows and a sheet of pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", type=Path, required=True, help="the ComfyUI tree")
    parser.add_argument("--models", nargs="+", default=[*SORTS, UNET])
    parser.add_argument("--file", type=Path, help="weights instead of the shipped ones")
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--sheet", type=Path, help="the PNG to write, of the first task")
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS))
    parser.add_argument("--speeds", nargs="+", type=float, default=[1.8, 2.0, 2.4, 3.0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=2, help="pictures of each class")
    parser.add_argument("--cfg", type=float)
    options = parser.parse_args()

    from ...benchmarks.pack import ROOT, import_alias

    import_host(options.host.resolve(), cpu=not torch.cuda.is_available())
    import_alias("warmgraph_backends", ROOT / "backends")
    rows: list[Row] = []
    seeds = tuple(range(1, options.seeds + 1))
    for name in options.models:
        model = Model.load(name, options.file)
        for sampler in options.samplers:
            task = Task(name, sampler, options.steps, seeds, options.cfg)
            bench = Bench(model, task)
            columns = {"all steps": bench.plain.pictures[:10]}
            for row, pictures in measure(
                bench, sampler, options.speeds, is_unet=model.is_unet, ways=options.ways
            ):
                print(line(row), flush=True)
                rows.append(row)
                if row.way in _SHEET and row.speed == options.speeds[-1]:
                    columns[f"{row.way}\n{row.psnr:.1f} dB, work {row.work:.2f}"] = pictures[:10]
            if sampler == options.samplers[0] and options.sheet:
                sheet = options.sheet.with_stem(f"{options.sheet.stem}_{name}")
                labels = [f"{kind}" for kind, _ in model.wanted(seeds)[:10]]
                scale = -(-_SHEET_PIXELS // bench.plain.pictures.shape[1])
                contact_sheet(columns, labels, sheet, scale=scale)
            facts = {"seeds": options.seeds, "cfg": options.cfg}
            unet.write(options.out, options.out.stem, rows, facts)  # a break loses one sampler


if __name__ == "__main__":
    main()
