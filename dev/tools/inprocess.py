"""Boot the real host inside this process, without a server, for tests that call its classes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from . import checkpoints

HOST_FLAGS = ("--cpu", "--use-pytorch-cross-attention")


class _ServerStub:
    """The few attributes of PromptServer that core nodes touch."""

    def __init__(self) -> None:
        from app.node_replace_manager import NodeReplaceManager

        self.client_id: str | None = None
        self.last_node_id: str | None = None
        self.last_prompt_id: str | None = None
        self.node_replace_manager = NodeReplaceManager()

    def send_sync(self, *_args: Any, **_kwargs: Any) -> None:
        """Drop the event: nobody listens in this process."""

    def send_progress_text(self, *_args: Any, **_kwargs: Any) -> None:
        """Drop the text."""


class Host(NamedTuple):
    """The booted host."""

    tree: Path
    base: Path
    argv: list[str]
    nodes: ModuleType
    folder_paths: ModuleType

    def model_file(self, kind: str, *, seed: int = 0, base: str | None = None) -> str:
        """Write a file of `kind` (see `checkpoints.FOLDERS`) once; return its name for loaders."""
        return checkpoints.ensure(self.base / "models", kind, seed=seed, base=base).name

    def load(self, kind: str = "narrowxl", *, seed: int = 0) -> tuple[Any, Any, Any]:
        """Return fresh (MODEL, CLIP, VAE) through the host's own CheckpointLoaderSimple."""
        name = self.model_file(kind, seed=seed)
        return self.nodes.CheckpointLoaderSimple().load_checkpoint(name)

    def encode(self, clip: Any, text: str) -> Any:
        """Return the CONDITIONING of a prompt; 77 tokens a chunk of 75 words."""
        return self.nodes.CLIPTextEncode().encode(clip, text)[0]

    def node(self, class_type: str, **inputs: Any) -> tuple[Any, ...]:
        """Run one core node (V1 or V3) by its id and return its outputs."""
        cls = self.nodes.NODE_CLASS_MAPPINGS[class_type]
        if hasattr(cls, "define_schema"):
            output = cls.execute(**inputs)
            return tuple(getattr(output, "result", output))  # some core nodes return a plain tuple
        return tuple(getattr(cls(), cls.FUNCTION)(**inputs))

    def sample(
        self,
        model: Any,
        positive: Any,
        negative: Any,
        *,
        width: int = 64,
        height: int = 64,
        batch: int = 1,
        steps: int = 2,
        cfg: float = 7.0,
        seed: int = 1,
        sampler: str = "euler",
        scheduler: str = "normal",
        denoise: float = 1.0,
        latent: Any = None,
    ) -> Any:
        """Run KSampler (pixels in width/height) and return the latent tensor [B, C, H/8, W/8]."""
        if latent is None:
            latent = self.nodes.EmptyLatentImage().generate(width, height, batch)[0]
        sampler_node = self.nodes.KSampler()
        out = sampler_node.sample(
            model, seed, steps, cfg, sampler, scheduler, positive, negative, latent, denoise
        )
        return out[0]["samples"]

    def sample_parts(
        self,
        model: Any,
        positive: Any,
        negative: Any,
        parts: Sequence[tuple[int, int]],
        *,
        steps: int,
        latent: Any,
        sampler: str = "euler",
        scheduler: str = "normal",
    ) -> Any:
        """Run KSamplerAdvanced once for each part (first step, last step) of `steps`, with leftover
        noise in between; returns the latent tensor.

        Args:
            model: a MODEL, or a list of one for each part.
        """
        models = model if isinstance(model, list) else [model] * len(parts)
        for number, (start, end) in enumerate(parts):
            (latent,) = self.node(
                "KSamplerAdvanced",
                model=models[number],
                add_noise="disable" if number else "enable",
                noise_seed=5,
                steps=steps,
                cfg=6.0,
                sampler_name=sampler,
                scheduler=scheduler,
                positive=positive,
                negative=negative,
                latent_image=latent,
                start_at_step=start,
                end_at_step=end,
                return_with_leftover_noise="enable" if end < steps else "disable",
            )
        return latent["samples"]

    def control(
        self, conditions: tuple[Any, Any], net: Any, image: Any, **options: Any
    ) -> tuple[Any, Any]:
        """Return (positive, negative) under a control, by Apply ControlNet (Advanced)."""
        positive, negative = self.node(
            "ControlNetApplyAdvanced",
            positive=conditions[0],
            negative=conditions[1],
            control_net=net,
            image=image,
            **{"strength": 0.8, "start_percent": 0.0, "end_percent": 1.0, **options},
        )
        return positive, negative

    def unload(self) -> None:
        """Unload every model, as a user does with Free Memory."""
        import comfy.model_management as management

        management.unload_all_models()
        management.soft_empty_cache()


def boot(tree: Path, base: Path) -> Host:
    """Import the host from `tree` with `base` as its base directory; once per process.

    Leaves sys.argv as the host's command line, because that is what build workers are given.
    """
    for name in ("custom_nodes", "user", "models", "input", "output"):
        (base / name).mkdir(parents=True, exist_ok=True)
    sys.argv = [str(tree / "main.py"), *HOST_FLAGS, "--base-directory", str(base)]
    sys.path.insert(0, str(tree))
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.cli_args  # reads sys.argv now
    import folder_paths
    import nodes
    import torch
    from server import PromptServer

    if not hasattr(PromptServer, "instance"):
        PromptServer.instance = _ServerStub()
    asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    torch.set_grad_enabled(False)
    from . import (  # noqa: F401  register by being imported
        narrow_arch,
        narrow_audio_video,
        narrow_transformers,
    )

    host = Host(tree, base, list(sys.argv), nodes, folder_paths)
    _booted.append(host)
    return host


#: That of this process, once there is one.
_booted: list[Host] = []


@contextlib.contextmanager
def booted(tree: Path) -> Iterator[Host]:
    """Give the host of this process: as it was booted, or from `tree` with a base directory that is
    gone afterwards.
    """
    if _booted:
        yield _booted[0]
        return
    with tempfile.TemporaryDirectory(prefix="warmgraph-host-") as base:
        yield boot(tree, Path(base))
