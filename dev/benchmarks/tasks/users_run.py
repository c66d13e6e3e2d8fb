"""What OneDiff's users did, replayed in one process: sizes, batch, img2img, save, load.

Each row is an image as a user makes it: (VAE Encode,) KSampler, VAE Decode, all by the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..host import Size, conditioning, end_node, ksampler, load_unet, load_vae
from ..measure import MIB, Probe, Stopwatch, vram_used_mib
from ..pack import brief, graph_files, import_engine, open_engine, settle
from .common import partial, start_libraries
from .rival import torch_compiled

NAME = "users_run"  # of the workflow and its graph folder
FILING_LIMIT_S = 30.0
LCM = {"sampler": "lcm", "scheduler": "sgm_uniform", "cfg": 1.0, "denoise": 0.5}


class Eager:
    """One contender: a MODEL and a VAE, and what can be counted about them; the host's own here."""

    def __init__(self, model: Any, vae: Any) -> None:
        self.model, self.vae = model, vae

    def counts(self) -> dict[str, int]:
        """What was counted so far; a row has the differences."""
        return {"builds": 0}

    def told(self, counted: dict[str, int], *, encoded: bool) -> dict[str, int]:
        """What one row's counts say; `encoded`: it started from an image."""
        return counted

    def all_built(self, limit_s: float) -> dict[str, Any]:
        """Wait for what is still being built."""
        return {}

    def save(self, make_image: Callable[[], None]) -> dict[str, Any]:
        """Save what was compiled, for which an image may have to be made."""
        return {}

    def close(self) -> dict[str, Any]:
        """End; what there is to tell about all rows."""
        return {}


class TorchCompile(Eager):
    """The whole model compiled as by the host's TorchCompileModel, the VAE's two halves too.

    The host has no node for a VAE; KJNodes' TorchCompileVAE replaces the same two modules.
    """

    def __init__(self, model: Any, vae: Any) -> None:
        import torch

        super().__init__(torch_compiled(model, dynamic=False), vae)
        root = vae.first_stage_model
        for part in ("encoder", "decoder"):
            setattr(root, part, torch.compile(getattr(root, part), dynamic=False))

    def counts(self) -> dict[str, int]:
        from torch._dynamo.utils import counters

        hits = counters["inductor"]["fxgraph_cache_hit"]  # traced again, but not compiled
        return {"builds": counters["stats"]["unique_graphs"] - hits, "cache_hits": hits}


class Ours(Eager):
    """Compile Model and Compile VAE as their widgets stand."""

    def __init__(self, model: Any, vae: Any, *, store: str, user: str, workers: int) -> None:
        self._store, self._user = Path(store), Path(user)
        self._workflow: Any = None
        self._probe = Probe()
        self._regions = {part: _regions(vae, part) for part in ("decoder", "encoder")}
        self._kinds: set[str] = set()
        self._began, self._files = time.time(), set(graph_files(self._store))
        (self._user / "workflows").mkdir(parents=True, exist_ok=True)
        self.engine = open_engine(
            self._store, workers=workers, user=self._user, workflow=lambda: self._workflow
        )
        super().__init__(*self._attach(self._probe.attach(model), vae))

    def _attach(self, model: Any, vae: Any) -> tuple[Any, Any]:
        return self.engine.compile_model(model), self.engine.compile_vae(vae)

    def counts(self) -> dict[str, int]:
        """Builds that were asked for, graphs that arrived, and calls of regions.

        Every graph is asked for when a node describes its kind: one that a row brings up has a key
        that no row had before. A kind's further graphs have no keys in a report.
        """
        reports = self._reports()
        for kind in (kind for report in reports for kind in report["kinds"]):
            if kind["key"]:
                self._kinds |= {f"{kind['key']} {each}" for each in ("key", *kind["variants"])}
        arrived = len(set(graph_files(self._store)) - self._files)
        return {
            "builds": max(len(self._kinds) - len(self._files), arrived),
            "arrived": arrived,
            "unet_calls": self._probe.passed,
            "compiled_calls": sum(report["calls"]["compiled"] for report in reports),
        }

    def told(self, counted: dict[str, int], *, encoded: bool) -> dict[str, int]:
        unet = self.engine.report(self.model)["regions"]["total"] * counted["unet_calls"]
        calls = unet + self._regions["decoder"] + encoded * self._regions["encoder"]
        return {
            **counted,
            "region_calls": calls,
            "eager_calls": calls - counted["compiled_calls"],
        }

    def all_built(self, limit_s: float) -> dict[str, Any]:
        watch = Stopwatch()
        for thing in (self.model, self.vae):
            settle(self.engine, thing, limit_s=limit_s)
        paths = [self._store / name for name in set(graph_files(self._store)) - self._files]
        last = max((path.stat().st_mtime for path in paths), default=self._began)
        return {
            "waited_seconds": round(watch.seconds(), 2),
            "all_built_seconds": round(last - self._began, 2),
            "graphs": len(graph_files(self._store)),
        }

    def save(self, make_image: Callable[[], None]) -> dict[str, Any]:
        """Save the workflow and run it once more, which links its graphs into NAME.graphs."""
        from warmgraph_backends.engine import WorkflowRef

        workflow = self._user / "workflows" / f"{NAME}.json"
        workflow.write_text("{}", encoding="utf-8")
        self._workflow = WorkflowRef(f"workflows/{NAME}.json", "default", "id-1")
        watch = Stopwatch()
        make_image()
        image = watch.seconds()
        wanted = {f".{name}" for name in graph_files(self._store)}
        folder = workflow.with_suffix(".graphs")
        while not wanted <= set(graph_files(folder)) and watch.seconds() < image + FILING_LIMIT_S:
            time.sleep(0.001)
        linked = watch.seconds() - image
        files = graph_files(folder)
        return {
            "image_seconds": round(image, 3),
            "linked_seconds": round(linked, 3),
            "graphs": len(files),
            "missing": len(wanted - set(files)),
            "mb": round(sum(files.values()) / 1e6, 2),
        }

    def close(self) -> dict[str, Any]:
        names = ("unet", "vae")
        reports = dict(zip(names, map(brief, self._reports()), strict=True))
        self.engine.close()
        return {"reports": reports}

    def _reports(self) -> list[dict[str, Any]]:
        return [self.engine.report(thing) for thing in (self.model, self.vae)]


class Loaded(Ours):
    """Load Compiled Graph and Load Compiled Graph (VAE), on the folder of the saved workflow."""

    def _attach(self, model: Any, vae: Any) -> tuple[Any, Any]:
        return (
            self.engine.load_graphs(model, NAME, strict=False),
            self.engine.load_vae_graphs(vae, NAME, strict=False),
        )

    def counts(self) -> dict[str, int]:
        """As ours, but what has a key is not asked for: only new files are builds."""
        counts = super().counts()
        return {**counts, "builds": counts["arrived"]}


CONTENDERS = {"eager": Eager, "torch_compile": TorchCompile, "ours": Ours, "loaded": Loaded}


def users_run(
    *,
    model: str,
    vae: str,
    kind: str,
    vae_kind: str,
    contender: str,
    rows: list[dict[str, Any]],
    steps: int = 20,
    lcm_steps: int = 8,
    again_at_once: bool = True,
    store: str = "",
    user: str = "",
    workers: int = 0,
    build_limit_s: float = 420.0,
) -> dict[str, Any]:
    """Make every row's image, and each a second time.

    The first row's time has the nodes' own in it, and the process's first use of the weights; not
    the boot and not the reading of the files. Nothing waits for builds before all rows were made.

    Args:
        contender: of `CONTENDERS`.
        rows: {"name", "size": [width, height, batch], "image": whether it starts from an image}.
        again_at_once: the second image of a row follows the first; else all second ones follow all
            first ones, and the builds' end before them; then the workflow is saved.
        store, user: ours: the graph store and the user's folder.

    Returns:
        {"rows": {name: {"seconds", "builds", "peak_mib", "again": {the same of the second}}},
        "built": when the last graph was there, "save"}; a partial one names the "row" at work.
    """
    chosen = CONTENDERS[contender]
    loaded, first_stage = load_unet(Path(model)), load_vae(Path(vae), vae_kind)
    options: dict[str, Any] = {}
    if issubclass(chosen, Ours):
        import_engine()
        options = {"store": store, "user": user, "workers": workers}
    start_libraries(loaded.load_device)
    result: dict[str, Any] = {"contender": contender, "rows": {}}
    partial({**result, "row": rows[0]["name"]})
    watch = Stopwatch()
    contestant = chosen(loaded, first_stage, **options)
    result["node_seconds"] = round(watch.seconds(), 3)

    def make(row: dict[str, Any], seed: int) -> None:
        size, how = Size(*row["size"]), {"steps": steps}
        if row["image"]:
            how = {"steps": lcm_steps, "latent": _encoded(contestant.vae, size), **LCM}
        prompts = conditioning(kind, seed=1), conditioning(kind, seed=2)
        latent = ksampler(contestant.model, *prompts, size, seed=seed, **how)
        contestant.vae.decode(latent)
        end_node()

    def visit(row: dict[str, Any], seed: int, *, first: bool = False) -> dict[str, Any]:
        before = {} if first else contestant.counts()
        _forget_peak()
        watch = Stopwatch()
        make(row, seed)
        seconds = watch.seconds() + (result["node_seconds"] if first else 0.0)
        counted = {name: count - before.get(name, 0) for name, count in contestant.counts().items()}
        told = contestant.told(counted, encoded=row["image"])
        return {"seconds": round(seconds, 3), **_vram(contestant), **told}

    for number, row in enumerate(rows):
        partial({**result, "row": row["name"]})
        made = result["rows"][row["name"]] = visit(row, number, first=number == 0)
        if again_at_once:
            partial({**result, "row": row["name"]})
            made["again"] = visit(row, number + 100)
    if not again_at_once:
        result["built"] = contestant.all_built(build_limit_s)
        for number, row in enumerate(rows):
            partial({**result, "row": row["name"]})
            result["rows"][row["name"]]["again"] = visit(row, number + 100)
        result["save"] = contestant.save(lambda: make(rows[0], 0))
    return {**result, **contestant.close()}


def _encoded(vae: Any, size: Size) -> Any:
    """The latent of an image, as LoadImage and VAE Encode give it."""
    import torch

    generator = torch.Generator().manual_seed(size.width)
    image = torch.rand(size.batch, size.height, size.width, 3, generator=generator)
    latent = vae.encode(image)
    end_node()
    return latent


def _regions(vae: Any, part: str) -> int:
    """Regions of a VAE's `decoder` or `encoder`: one decode or encode calls each once."""
    from warmgraph_backends.attaching.vae import AttachedVAE

    plan = AttachedVAE(vae, part).plan(vae.first_stage_model)
    return 0 if isinstance(plan, str) else len(plan.places) + len(plan.outside)


def _forget_peak() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _vram(user: Eager) -> dict[str, Any]:
    """Peak of PyTorch's allocated bytes, and the weights that dynamic VRAM holds beside them.

    `device_mib` is what the driver says now, of all processes: of ours the workers too.
    """
    import torch

    if not torch.cuda.is_available():
        return {"peak_mib": None}
    patchers = [p for p in (user.model, user.vae.patcher) if p.is_dynamic()]
    held = sum(p.loaded_size() - p.model.model_loaded_weight_memory for p in patchers)
    allocated = torch.cuda.max_memory_allocated()
    return {
        "peak_mib": round((allocated + held) / MIB),
        "allocated_mib": round(allocated / MIB),
        "device_mib": round(vram_used_mib()),
    }
