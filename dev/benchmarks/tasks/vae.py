"""The VAE: eager against ours, interleaved in one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..host import load_vae
from ..kernels import kernel_times
from ..measure import Stopwatch, elapsed_ms, mark, rel_l2, summary
from ..pack import brief, graph_files, open_engine, settle
from .common import BUILD_LIMIT_S, partial, unserved
from .residency import empty_caches

WARM_SIDE = 256  # no size that is measured
SETTLE_CALLS = 20  # graphs that load beside the first calls are waited for at most this many


def vae_speed(
    *,
    model: str,
    kind: str,
    store: str,
    sizes: list[list[Any]],
    compare: list[int],
    workers: int = 0,
    warm: int = 3,
    rounds: int = 5,
) -> dict[str, Any]:
    """Time both at every size, and compare their pixels.

    Args:
        sizes: ["decode" or "encode", width, height] in pixels.
        compare: width and height of the image whose pixels are compared.

    Returns:
        {"rows": {"decode WxH": {"eager", "ours", "speedup", "call_speedup", "rel_l2",
        "eager_calls"}}, "errors", "build_seconds", ...}
    """
    folder = Path(store)
    before = set(graph_files(folder))
    eager = load_vae(Path(model), kind)
    engine = open_engine(folder, workers=workers)
    watch = Stopwatch()
    ours = engine.compile_vae(eager, when_missing="wait")
    build_seconds = watch.seconds()
    counts = settle_vae(engine, ours)
    files = graph_files(folder)
    result: dict[str, Any] = {
        "dtype": str(eager.vae_dtype),
        "build_seconds": round(build_seconds, 2),
        "all_built_seconds": round(watch.seconds(), 2),
        "builds": len(set(files) - before),
        "graphs": len(files),
        "disk_mb": round(sum(files.values()) / 1e6, 2),
        "files": files,
        "kinds": engine.report(ours)["kinds"],
        "region_calls": counts,
        "rows": {},
    }
    partial(result)
    vaes = {"eager": eager, "ours": ours}
    for work, width, height in sizes:
        given = vae_input(eager, work, width, height)
        compiled = served_calls(engine, ours)
        row, outputs = time_vaes(vaes, work, given, warm=warm, rounds=rounds)
        row["rel_l2"] = rel_l2(outputs["ours"], outputs["eager"])
        row["eager_calls"] = counts[work] * (warm + rounds) - (
            served_calls(engine, ours) - compiled
        )
        row["profile"] = {
            name: kernel_times(functools.partial(getattr(vae, work), given))
            for name, vae in vaes.items()
        }
        result["rows"][f"{work} {width}x{height}"] = row
        partial(result)
    result["errors"] = _errors(eager, ours, Path(model), kind, *compare)
    result["report"] = brief(engine.report(ours))
    engine.close()
    return result


def vae_fill(*, model: str, kind: str, store: str, workers: int = 0) -> dict[str, Any]:
    """Build all graphs into a store, and run each once so that its first comparison is done."""
    vae = load_vae(Path(model), kind)
    engine = open_engine(Path(store), workers=workers)
    ours = engine.compile_vae(vae, when_missing="wait")
    settle_vae(engine, ours)
    report = brief(engine.report(ours))
    engine.close()
    return {"graphs": len(graph_files(Path(store))), "report": report}


def vae_wide(*, model: str, kind: str, store: str, sizes: list[list[int]]) -> dict[str, Any]:
    """Decode and encode sizes beyond what 32 bits can count, against eager.

    Args:
        sizes: [width, height] in pixels.

    Returns:
        {"rows": {"WxH": {"decode", "encode"} as relative L2 errors, "eager_calls"}, "report"}
    """
    plain = load_vae(Path(model), kind)
    engine = open_engine(Path(store))
    ours = engine.compile_vae(plain, when_missing="wait")
    counts = settle_vae(engine, ours)
    rows = {}
    for width, height in sizes:
        compiled = served_calls(engine, ours)
        row: dict[str, Any] = {}
        for work in ("decode", "encode"):
            given = vae_input(plain, work, width, height)
            row[work] = rel_l2(getattr(ours, work)(given), getattr(plain, work)(given))
            empty_caches()
        row["eager_calls"] = sum(counts.values()) - (served_calls(engine, ours) - compiled)
        rows[f"{width}x{height}"] = row
        partial({"rows": rows})
    report = engine.report(ours)
    wide = {kind["kind"]: kind["variants"].get("wide") for kind in report["kinds"]}
    engine.close()
    return {"rows": rows, "report": brief(report), "wide": wide}


def settle_vae(engine: Any, vae: Any) -> dict[str, int]:
    """Run until all that can be compiled is, and twice the same was; calls of a decode and encode.

    A first call may find that a graph must be dropped, so its count does not stand alone.
    """
    inputs = {work: vae_input(vae, work, WARM_SIDE, WARM_SIDE) for work in ("decode", "encode")}
    counts = dict.fromkeys(inputs, 0)
    for _ in range(SETTLE_CALLS):
        start = served_calls(engine, vae)
        previous = dict(counts)
        for work, given in inputs.items():
            before = served_calls(engine, vae)
            getattr(vae, work)(given)
            counts[work] = served_calls(engine, vae) - before
        report = engine.report(vae)
        eager = sum(entry["places"] for entry in report["eager"])
        # Each region is called once, by the decode or by the encode.
        served = unserved(report, start, unet_calls=1) <= eager
        if served and counts == previous and _at_rest(report):
            return counts
        settle(engine, vae, limit_s=BUILD_LIMIT_S)
    return counts


def _at_rest(report: dict[str, Any]) -> bool:
    return not any(
        {kind["state"], *kind["variants"].values()} & {"building", "loading"}
        for kind in report["kinds"]
    )


def served_calls(engine: Any, vae: Any) -> int:
    """Calls of regions that graphs have served so far."""
    return int(engine.report(vae)["calls"]["compiled"])


def vae_input(vae: Any, work: str, width: int, height: int, batch: int = 1) -> Any:
    """A latent on the CPU, as a sampler leaves it, or an image on the VAE's device.

    The image is there because the host's work on it before its VAE runs is where it lies.
    """
    import torch

    generator = torch.Generator().manual_seed(width * 8192 + height)
    if work == "decode":
        return torch.randn(batch, 4, height // 8, width // 8, generator=generator)
    return torch.rand(batch, height, width, 3, generator=generator).to(vae.device)


def time_vaes(
    vaes: dict[str, Any], work: str, given: Any, *, warm: int, rounds: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take turns between the VAEs; the model's own call by the GPU's clock, all of it by ours.

    Returns:
        Times and speedups, and what each VAE gave last.
    """
    outputs: dict[str, Any] = {}
    model_ms: dict[str, list[float]] = {name: [] for name in vaes}
    call_ms: dict[str, list[float]] = {name: [] for name in vaes}
    for turn in range(warm + rounds):
        for name, vae in vaes.items():
            watch = Stopwatch()
            with marked(vae, work) as marks:
                outputs[name] = getattr(vae, work)(given)
            seconds = watch.seconds()
            if len(marks) != 2:  # the host fell back to tiles
                raise RuntimeError(f"{work} must call its model once, got {len(marks)} marks")
            if turn >= warm:
                model_ms[name].append(elapsed_ms(*marks))
                call_ms[name].append(seconds * 1000.0)
    row: dict[str, Any] = {
        name: {"model_ms": summary(model_ms[name]), "call_ms": summary(call_ms[name])}
        for name in vaes
    }
    for key, times in (("speedup", "model_ms"), ("call_speedup", "call_ms")):
        row[key] = round(row["eager"][times]["median"] / row["ours"][times]["median"], 3)
    return row, outputs


@contextlib.contextmanager
def marked(vae: Any, work: str) -> Iterator[list[Any]]:
    """While this lasts, mark where the VAE goes to its first-stage model and where it is back.

    The marks sit on what the host asks for right before and right after it, and not on the model's
    own `decode`: so whatever a VAE puts around that call is timed with it. A model that brings its
    pixels to the host piece by piece does so within that time.
    """
    marks: list[Any] = []
    by_pieces = getattr(vae.first_stage_model, "comfy_has_chunked_io", False)
    before, after = (vae, "process_input"), (vae, "vae_output_dtype")
    if work == "decode":
        before = (vae.patcher, "get_free_memory")
        if by_pieces:  # whose pixels' dtype is asked for before
            after = (vae, "process_output")

    def leave(*args: Any) -> Any:
        value = asked(*args)
        if len(marks) < 2:
            marks[:] = [mark()]
        return value

    def arrive(*args: Any) -> Any:
        if len(marks) == 1:
            marks.append(mark())
        return answered(*args)

    asked = getattr(*before)
    answered = getattr(*after)
    with _instead(*before, leave), _instead(*after, arrive):
        yield marks


@contextlib.contextmanager
def _instead(thing: Any, name: str, function: Any) -> Iterator[None]:
    """Put a function into an object's instance, and back what was there."""
    own = vars(thing)
    theirs = own.get(name)
    own[name] = function
    try:
        yield
    finally:
        if theirs is None:
            del own[name]
        else:
            own[name] = theirs


def _errors(
    eager: Any, ours: Any, model: Path, kind: str, width: int, height: int
) -> dict[str, Any]:
    """How far ours is from eager in pixels of 0 to 1, and each from eager in full float32.

    The float32 reference has the same weights, and convolutions without TF32.
    """
    import torch

    latent = vae_input(eager, "decode", width, height)
    image = vae_input(eager, "encode", width, height)
    pixels = {"eager": eager.decode(latent), "ours": ours.decode(latent)}
    encoded = rel_l2(ours.encode(image), eager.encode(image))
    exact = load_vae(model, kind, dtype=torch.float32)
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        reference = exact.decode(latent)
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    result: dict[str, Any] = {
        "max_difference": _largest(pixels["ours"], pixels["eager"]),
        "decode_rel_l2": rel_l2(pixels["ours"], pixels["eager"]),
        "encode_rel_l2": encoded,
        "reference_pixels": {"mean": float(reference.mean()), "std": float(reference.std())},
    }
    for name, found in pixels.items():
        mean = float((found - reference).double().abs().mean())
        result[name] = {"largest": _largest(found, reference), "mean": mean}
    for key in ("largest", "mean"):
        theirs = result["eager"][key]
        result[f"{key}_ratio"] = round(result["ours"][key] / theirs, 4) if theirs else None
    return result


def _largest(found: Any, reference: Any) -> float:
    """Largest difference of two images; NaN counts as infinite."""
    value = float((found - reference).abs().max())
    return value if value == value else float("inf")
