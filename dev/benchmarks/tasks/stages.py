"""How long each stage of a template takes besides the transformer's passes, as the host runs it."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..measure import Stopwatch, peak_mib, start_peak
from ..models import VAES, random_network
from ..pack import open_engine, settle
from ..stages import (
    LTX_AUDIO_VAE,
    LTX_UPSAMPLER,
    LTX_VIDEO_VAE,
    LTX_VOCODER,
    TEMPLATES,
    Text,
)
from .common import BUILD_LIMIT_S, partial
from .residency import empty_caches
from .video_vae import h3_narrowed

#: Depths of which a text encoder is made; the real one's time lies on the line through both.
DEPTHS = (4, 8)
SETTLE_CALLS = 5
ROUNDS = 3
IMAGE_TOKEN = 151655


def stages(
    *, template: str, small: bool, store: str, workers: int = 0, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Time every stage of a template with random weights, all of them on the device already.

    Args:
        small: narrow and tiny, for a smoke run.
        store: of the graphs of a VAE that is compiled, too.

    Returns:
        {"stages": [{"name", "calls": how often it runs, "seconds": one of them, by the wall clock,
        "peak_mib", "compiled_seconds" where it is served}], "text_depths"}
    """
    given = TEMPLATES[template]
    bench = _Bench(rounds)
    text = _text_seconds(given.text, small=small, rounds=rounds)
    bench.add("text encoder", text["seconds"], calls=given.text.prompts)
    vae = _vae(given.vae, small=small)
    with _compiled(vae, Path(store), workers) as ours:
        for size in given.images:
            pixels = _pixels(_reduced(size, vae, small))
            bench.time(f"encode {_name(size)}", "encode", vae, ours, pixels)
        decode = "decode" if given.tiled is None else "decode_tiled"
        tiles = {} if given.tiled is None else _tiles(vae, *given.tiled)
        latent = _latent(vae, _reduced(given.size, vae, small))
        bench.time(f"{decode} {_name(given.size)}", decode, vae, ours, latent, **tiles)
    if given.upsampled is not None:
        call = _upsampler(vae, given.upsampled, small=small)
        bench.add("latent upsampler", *_seconds(call, rounds))
    del vae
    _release()
    if given.sound is not None:
        name, shape = given.sound
        _time_sound(bench, _vae(name, small=small), shape, small=small)
    return {"stages": bench.rows, "text_depths": text["depths"]}


class _Bench:
    """What was measured so far."""

    def __init__(self, rounds: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.rounds = rounds

    def add(self, name: str, seconds: float, peak: float | None = None, *, calls: int = 1) -> None:
        """Note a stage."""
        row = {"name": name, "calls": calls, "seconds": round(seconds, 4), "peak_mib": peak}
        self.rows.append(row)
        partial({"stages": self.rows})

    def time(self, name: str, work: str, vae: Any, ours: Any, given: Any, **options: Any) -> None:
        """Time a VAE's work, and that of the compiled one if there is one."""
        self.add(name, *_seconds(lambda: getattr(vae, work)(given, **options), self.rounds))
        if ours is not None:
            call = functools.partial(getattr(ours.vae, work), given, **options)
            if ours.settled(call):
                seconds, peak = _seconds(call, self.rounds)
                self.rows[-1] |= {
                    "compiled_seconds": round(seconds, 4),
                    "compiled_peak_mib": peak,
                }
                partial({"stages": self.rows})


class _Ours:
    """A VAE through Compile VAE."""

    def __init__(self, engine: Any, vae: Any) -> None:
        self.vae = engine.compile_vae(vae, when_missing="wait")
        self._engine = engine

    def settled(self, call: Callable[[], Any]) -> bool:
        """Run until all that can be compiled is; False where no part of it is ours."""
        for _ in range(SETTLE_CALLS):
            call()
            settle(self._engine, self.vae, limit_s=BUILD_LIMIT_S)
            report = self._engine.report(self.vae)
            if report["regions"]["eager"] == 0:
                break
        return bool(report["calls"]["compiled"])


@contextlib.contextmanager
def _compiled(vae: Any, store: Path, workers: int) -> Iterator[Any]:
    engine = open_engine(store, workers=workers)
    try:
        yield _Ours(engine, vae)
    finally:
        engine.close()


def _seconds(call: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The median of some calls after a first one, and the peak of memory."""
    call()
    start_peak()
    times = []
    for _ in range(rounds):
        watch = Stopwatch()
        call()
        times.append(watch.seconds())
    return statistics.median(times), round(peak_mib())


def _text_seconds(text: Text, *, small: bool, rounds: int) -> dict[str, Any]:
    """Seconds of one prompt, and of the encoders of few blocks from which that is."""
    found = {}
    for depth in DEPTHS:
        found[depth] = _depth_seconds(text, depth, small=small, rounds=rounds)
        _release()
    low, high = DEPTHS
    block = (found[high] - found[low]) / (high - low)
    return {"seconds": found[low] + block * (text.depth - low), "depths": found}


def _depth_seconds(text: Text, depth: int, *, small: bool, rounds: int) -> float:
    encoder, prompt = _text_encoder(text, depth, small=small), _prompt(text, small=small)
    return _seconds(functools.partial(encoder.encode_token_weights, [prompt]), rounds)[0]


def _text_encoder(text: Text, depth: int, *, small: bool) -> Any:
    import comfy.model_management
    import torch

    module, _, cls = text.root.partition(":")
    device = comfy.model_management.get_torch_device()
    settings = {text.layers: depth, **(text.small if small else {})}
    options = {"model_name": "measured", "measured_model_config": settings}
    encoder = getattr(importlib.import_module(module), cls)(
        device=device, dtype=torch.bfloat16, model_options=options
    )
    for name, value in encoder.named_parameters():
        # What looks at images has no part where the prompt has none.
        if text.image is not None or not name.startswith("transformer.vision_model"):
            torch.nn.init.normal_(value, std=0.02)
    return encoder


def _prompt(text: Text, *, small: bool) -> list[Any]:
    tokens: list[Any] = [(0, 1.0)] * max(0, text.padded - text.tokens)
    tokens += [(100 + n, 1.0) for n in range(text.tokens)]
    if text.image is not None:
        width, height = (64, 64) if small else text.image
        image = {"type": "image", "data": _pixels((width, height, 1)), "original_type": "image"}
        tokens.insert(8, (image, 1.0))
    return tokens


def _vae(name: str, *, small: bool) -> Any:
    """A VAE with random weights, as the host detects it by their names and shapes."""
    import comfy.sd

    with h3_narrowed(32) if small else contextlib.nullcontext():
        weights, metadata = NETWORKS[name](small)
        vae = comfy.sd.VAE(sd=weights, metadata=metadata)
    vae.throw_exception_if_invalid()
    return vae


def _weights(make: Callable[[], Any]) -> dict[str, Any]:
    import torch

    with torch.device("meta"):
        network = make()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    return random_network(shapes, dtype="bfloat16", seed=0, device=device)


def _ltx_video(small: bool) -> tuple[dict[str, Any], Any]:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    widths = {f"{side}_base_channels": 16 for side in ("encoder", "decoder")} if small else {}
    config = {**LTX_VIDEO_VAE, **widths}
    return _weights(lambda: VideoVAE(config=config)), {"config": json.dumps({"vae": config})}


def _ltx_audio(small: bool) -> tuple[dict[str, Any], Any]:
    from comfy.ldm.lightricks.vae.audio_vae import AudioVAE

    vocoder = LTX_VOCODER
    if small:
        narrow = {"vocoder": 128, "bwe": 64}
        vocoder = {
            name: {**part, "upsample_initial_channel": narrow[name]}
            for name, part in vocoder.items()
        }
    metadata = {"config": json.dumps({"audio_vae": LTX_AUDIO_VAE, "vocoder": vocoder})}
    return _weights(lambda: AudioVAE(metadata=metadata)), metadata


def _h3_video(_small: bool) -> tuple[dict[str, Any], Any]:
    from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE

    return _weights(MiniMaxH3VideoVAE), None


def _h3_audio(_small: bool) -> tuple[dict[str, Any], Any]:
    from comfy.ldm.minimax.audio_vae import MiniMaxH3AudioVAE

    return _weights(MiniMaxH3AudioVAE), None


def _wan(small: bool) -> tuple[dict[str, Any], Any]:
    from comfy.ldm.wan.vae import WanVAE

    settings = {"dim": 8 if small else 96, "z_dim": 16, "temperal_downsample": [False, True, True]}
    return _weights(lambda: WanVAE(**settings)), None


def _flux(_small: bool) -> tuple[dict[str, Any], Any]:
    from comfy.ldm.modules.diffusionmodules.model import Decoder, Encoder

    config = {**VAES["vae"], "z_channels": 16}
    parts = {"encoder": Encoder, "decoder": Decoder}
    return {
        f"{name}.{key}": value
        for name, part in parts.items()
        for key, value in _weights(functools.partial(part, **config)).items()
    }, None


NETWORKS: dict[str, Callable[[bool], tuple[dict[str, Any], Any]]] = {
    "ltx_video": _ltx_video,
    "ltx_audio": _ltx_audio,
    "h3_video": _h3_video,
    "h3_audio": _h3_audio,
    "wan": _wan,
    "flux": _flux,
}


def _upsampler(vae: Any, shape: tuple[int, ...], *, small: bool) -> Callable[[], Any]:
    """What the node LTXVLatentUpsampler does with its model on the device."""
    import comfy.model_management
    import comfy.ops
    import torch
    from comfy.ldm.lightricks.latent_upsampler import LatentUpsampler

    config = {**LTX_UPSAMPLER, **({"mid_channels": 32} if small else {})}
    operations = comfy.ops.disable_weight_init
    weights = _weights(lambda: LatentUpsampler.from_config(config, operations))
    device = comfy.model_management.get_torch_device()
    dtype = comfy.model_management.vae_dtype(allowed_dtypes=[torch.bfloat16, torch.float32])
    model = LatentUpsampler.from_config(config, operations).to(device=device, dtype=dtype)
    model.load_state_dict(weights)
    latent = torch.randn(*shape[:2], *((2, 2, 2) if small else shape[2:]))

    def call() -> Any:
        statistics = vae.first_stage_model.per_channel_statistics
        larger = model(statistics.un_normalize(latent.to(device=device, dtype=dtype)))
        larger = statistics.normalize(larger)
        return larger.to(comfy.model_management.intermediate_device(), latent.dtype)

    return call


def _time_sound(bench: _Bench, vae: Any, shape: tuple[int, ...], *, small: bool) -> None:
    """Time an audio's decode and, of it, what makes the wave."""
    import torch

    sizes = [min(side, 32) if small else side for side in shape]
    latent = torch.randn(sizes)
    seconds, peak = _seconds(lambda: vae.decode(latent), bench.rounds)
    network = vae.first_stage_model
    vocoder = network.vocoder if hasattr(network, "vocoder") else network.decoder
    seen: list[Any] = []
    hook = vocoder.register_forward_pre_hook(lambda _module, given: seen.append(given))
    vae.decode(latent)
    hook.remove()
    wave = _seconds(lambda: vocoder(*seen[0]), bench.rounds)[0]
    bench.add("audio VAE decode", max(0.0, seconds - wave), peak)
    bench.add("vocoder", wave)


def _pixels(size: tuple[int, int, int]) -> Any:
    import torch

    width, height, frames = size
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(0))


def _latent(vae: Any, size: tuple[int, int, int]) -> Any:
    """A latent on the processor, as a sampler leaves it."""
    import torch

    width, height, frames = size
    side = vae.spacial_compression_decode()
    middle = () if vae.latent_dim == 2 else (vae.downscale_ratio[0](frames),)
    shape = (1, vae.latent_channels, *middle, height // side, width // side)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _reduced(size: tuple[int, int, int], vae: Any, small: bool) -> tuple[int, int, int]:
    """A size in pixels; tiny in a smoke run."""
    if not small:
        return size
    side = 2 * vae.spacial_compression_decode()
    return side, side, min(size[2], 22)


def _tiles(
    vae: Any, tile: int, overlap: int, frames: int, overlap_frames: int
) -> dict[str, int | None]:
    """What the node VAEDecodeTiled makes of what it is given."""
    side, time = vae.spacial_compression_decode(), vae.temporal_compression_decode()
    length = max(2, frames // time)
    return {
        "tile_x": tile // side,
        "tile_y": tile // side,
        "overlap": overlap // side,
        "tile_t": length,
        "overlap_t": max(1, min(length // 2, overlap_frames // time)),
    }


def _name(size: tuple[int, int, int]) -> str:
    width, height, frames = size
    return f"{width}x{height}" + (f", {frames} frames" if frames > 1 else "")


def _release() -> None:
    """Take all models off the device."""
    import comfy.model_management

    gc.collect()
    comfy.model_management.unload_all_models()
    empty_caches()
