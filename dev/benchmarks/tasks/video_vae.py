"""A video VAE: eager against ours, interleaved in one process, and where eager's time goes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from ..kernels import kernel_times
from ..measure import MIB, Stopwatch, elapsed_ms, mark, rel_l2, summary
from ..models import operations
from ..pack import brief, graph_files, open_engine, settle
from ..stages import LTX_VIDEO_VAE
from .common import BUILD_LIMIT_S, partial
from .residency import empty_caches
from .vae import time_vaes

SETTLE_CALLS = 5


class Kind(NamedTuple):
    """A video VAE of the host.

    Attributes:
        network: makes it, so many channels wide at its outermost blocks.
        config: what the metadata of its file say of it then; None where they say nothing.
        warm: width, height and frames; no size that is measured.
        damped: how the names of weights end that add to what there is.
        convolutions: [channels, frames, sides as a part of the video's] of the decoder's.
        narrowed: while it lasts, the host makes one so wide, where it takes no width from a file.
        dtype: of the files that people have; another than the host's is cast in each call.
    """

    network: Callable[[int], Any]
    config: Callable[[int], dict[str, Any]] | None
    warm: tuple[int, int, int]
    damped: tuple[str, ...]
    convolutions: tuple[tuple[int, int, int], ...]
    narrowed: Callable[[int], AbstractContextManager[Any]] = nullcontext
    dtype: str = "bfloat16"


def _wan21(dim: int) -> Any:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(dim=dim, z_dim=16, temperal_downsample=[False, True, True])


def _ltx23(dim: int) -> Any:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(config=_ltx23_config(dim))


def _ltx23_config(dim: int) -> dict[str, Any]:
    """What the files of LTX-2.3 say of their VAE, 128 channels wide, for one so wide."""
    return {**LTX_VIDEO_VAE, "encoder_base_channels": dim, "decoder_base_channels": dim}


def _h3(_dim: int) -> Any:
    from comfy.ldm.minimax import vae as host

    layers = operations()
    takes = inspect.signature(host.MiniMaxH3VideoVAE).parameters  # from ComfyUI 0.33 on
    given = {"operations": layers} if "operations" in takes else {}
    with patch.object(host, "ops", layers):
        return host.MiniMaxH3VideoVAE(**given)


@contextlib.contextmanager
def h3_narrowed(dim: int) -> Iterator[None]:
    """The host knows one size of it: an encoder 128 channels wide, a decoder of 36 blocks."""
    from comfy.ldm.minimax import vae as host

    if dim == 128:
        yield
        return
    decoder = functools.partial(host.ViT3DDecoder, num_layers=2, heads=2)
    whole = functools.partial(host.MiniMaxH3VideoVAE, ch=dim, ch_mult=(1,) * 6, num_res_blocks=1)
    with patch.multiple(host, ViT3DDecoder=decoder, MiniMaxH3VideoVAE=whole):
        yield


#: How the names of weights end that are about one.
_ONES = ("gamma", "std-of-means", "latents_std", "scale1", "scale2")
_ONES += ("norm1.weight", "norm2.weight", "norm_out.weight")

KINDS = {
    "wan21": Kind(
        _wan21,
        None,
        (64, 64, 5),
        (".residual.6.weight", ".proj.weight"),
        ((96, 2, 1), (192, 4, 2), (384, 2, 4)),
    ),
    "ltx23": Kind(
        _ltx23,
        _ltx23_config,
        (128, 128, 17),
        (".conv2.conv.weight",),
        ((128, 9, 4), (256, 9, 8), (512, 9, 8)),
    ),
    "h3": Kind(_h3, None, (64, 64, 22), (), (), h3_narrowed, "float16"),
}


def video_vae(
    *,
    kind: str,
    dim: int,
    store: str,
    sizes: list[list[Any]],
    peak: list[int],
    exact: list[int],
    workers: int = 0,
    warm: int = 1,
    rounds: int = 4,
) -> dict[str, Any]:
    """Time both at every size, compare what they give, and profile a decode of either.

    Args:
        kind: one of `KINDS`.
        dim: channels of the VAE's outermost blocks.
        sizes: ["decode" or "encode", width, height, frames] in pixels.
        peak: width, height and frames of the decode whose peak is taken, and that is profiled.
        exact: width, height and frames of the decode that is compared with float32.

    Returns:
        {"rows": {"decode WxH, N frames": {"eager", "ours", "speedup", "rel_l2", "eager_places"}},
        "peak_mib", "profile", "convolutions", "from_float32", ...}
    """
    import torch

    eager = _load(kind, dim)
    folder = Path(store)
    before = set(graph_files(folder))
    engine = open_engine(folder, workers=workers)
    watch = Stopwatch()
    ours = engine.compile_vae(eager, when_missing="wait")
    build_seconds = watch.seconds()
    _settle(engine, ours, kind)
    files = graph_files(folder)
    vaes = {"eager": eager, "ours": ours}
    result: dict[str, Any] = {
        "dtype": str(eager.vae_dtype),
        "cudnn": torch.backends.cudnn.version(),
        "build_seconds": round(build_seconds, 2),
        "builds": len(set(files) - before),
        "graphs": len(files),
        "disk_mb": round(sum(files.values()) / 1e6, 2),
        "rows": {},
    }
    partial(result)
    for work, *size in sizes:
        row = _time(engine, vaes, work, _input(eager, work, *size), warm=warm, rounds=rounds)
        width, height, frames = size
        result["rows"][f"{work} {width}x{height}, {frames} frames"] = row
        partial(result)
    latent = _input(eager, "decode", *peak)
    result["peak_mib"] = {name: _peak(vae, latent) for name, vae in vaes.items()}
    result["profile"] = {
        name: kernel_times(functools.partial(vae.decode, latent)) for name, vae in vaes.items()
    }
    result["convolutions"] = _convolutions(eager, kind, *peak)
    partial(result)
    given = _input(eager, "decode", *exact)
    result["from_float32"] = _from_float32(vaes, kind, dim, given)
    result["report"] = brief(engine.report(ours))
    engine.close()
    return result


def _load(kind: str, dim: int, dtype: Any = None) -> Any:
    """A VAE with random weights, as the host detects it by their names, shapes and metadata."""
    import comfy.sd
    import torch

    known = KINDS[kind]
    with known.narrowed(dim), torch.device("meta"):
        network = known.network(dim)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, value in network.state_dict().items():
        drawn = torch.randn(value.shape, device=device, generator=generator)
        if name.endswith(_ONES):
            drawn = 1.0 + 0.05 * drawn
        elif value.dim() > 1:
            damped = 0.3 if name.endswith(known.damped) else 1.0
            drawn *= damped / math.sqrt(math.prod(value.shape[1:]))
        else:
            drawn *= 0.02
        weights[name] = drawn.to(getattr(torch, known.dtype)).cpu()
    config = known.config and {"config": json.dumps({"vae": known.config(dim)})}
    with known.narrowed(dim):
        return comfy.sd.VAE(sd=weights, dtype=dtype, metadata=config)


def _input(vae: Any, work: str, width: int, height: int, frames: int) -> Any:
    """A latent on the CPU, as a sampler leaves it, or frames on the VAE's device."""
    import torch

    length, *sides = vae.downscale_ratio
    generator = torch.Generator().manual_seed(width * 8192 + height)
    if work == "decode":
        pixels = [n // side for n, side in zip((height, width), sides, strict=True)]
        shape = (1, vae.latent_channels, length(frames), *pixels)
        return torch.randn(shape, generator=generator)
    return torch.rand(frames, height, width, 3, generator=generator).to(vae.device)


def _settle(engine: Any, vae: Any, kind: str) -> None:
    """Run until every region is served by its graph, or nothing is left to wait for."""
    inputs = {work: _input(vae, work, *KINDS[kind].warm) for work in ("decode", "encode")}
    for _ in range(SETTLE_CALLS):
        for work, given in inputs.items():
            getattr(vae, work)(given)
        settle(engine, vae, limit_s=BUILD_LIMIT_S)
        if engine.report(vae)["regions"]["eager"] == 0:
            break


def _time(
    engine: Any, vaes: dict[str, Any], work: str, given: Any, *, warm: int, rounds: int
) -> dict[str, Any]:
    """Time both, and compare what they gave."""
    row, outputs = time_vaes(vaes, work, given, warm=warm, rounds=rounds)
    row["rel_l2"] = rel_l2(outputs["ours"], outputs["eager"])
    row["eager_places"] = sum(e["places"] for e in engine.report(vaes["ours"])["eager"])
    return row


def _peak(vae: Any, latent: Any) -> float | None:
    """PyTorch's peak of allocated MiB over one decode, from an emptied cache on; None on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    empty_caches()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    vae.decode(latent)
    torch.cuda.synchronize()
    return round(torch.cuda.max_memory_allocated() / MIB, 1)


def _convolutions(vae: Any, kind: str, width: int, height: int, _frames: int) -> dict[str, Any]:
    """Milliseconds of the decoder's convolutions by the layout that their input has."""
    import comfy.ops
    import torch

    found = {}
    formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d}
    for channels, frames, part in KINDS[kind].convolutions:
        layer = comfy.ops.disable_weight_init.Conv3d(channels, channels, 3, padding=(0, 1, 1))
        layer = layer.to(device=vae.device, dtype=vae.vae_dtype)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        shape = (1, channels, frames + 2, height // part, width // part)
        x = torch.randn(shape, device=vae.device, dtype=vae.vae_dtype)
        row = {}
        for name, memory_format in formats.items():
            given, times = x.contiguous(memory_format=memory_format), []
            for _ in range(8):
                begin = mark()
                layer(given)
                times.append(elapsed_ms(begin, mark()))
            row[name] = summary(times[3:])["median"]
        found["x".join(map(str, shape))] = row
    return found


def _from_float32(vaes: dict[str, Any], kind: str, dim: int, latent: Any) -> dict[str, float]:
    """How far each is from eager in full float32, convolutions without TF32."""
    import torch

    pixels = {name: vae.decode(latent) for name, vae in vaes.items()}
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        reference = _load(kind, dim, torch.float32).decode(latent)
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    return {name: rel_l2(found, reference) for name, found in pixels.items()}
