"""A small model of video and audio through Compile Model beside eager, call by call; and what the
host's nodes put into its latents and prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, Probe

#: A latent, and a prompt's facts, changed as a node does it.
Change = Callable[[dict[str, Any], Any], tuple[dict[str, Any], Any]]


class AvRun:
    """A small model under a probe, with Compile Model inside the probe."""

    def __init__(self, host: Host, lab: Lab, kind: str, plain: Any = None) -> None:
        self.host, self.lab, self.kind = host, lab, kind
        self.probe = Probe()
        self.plain = self.probe.attach(transformers.load(kind) if plain is None else plain)
        self.model = lab.compiled(self.plain)
        self.blocks = len(
            self.root.blocks if kind.startswith("h3") else self.root.transformer_blocks
        )

    @property
    def root(self) -> Any:
        return self.plain.model.diffusion_model

    def sample(
        self,
        height: int = 6,
        width: int = 4,
        frames: int = 3,
        *,
        sounds: int = 8,
        batch: int = 1,
        tokens: int = 13,
        negative_tokens: int | None = None,
        cfg: float = 1.0,
        steps: int = 1,
        model: Any = None,
        change: Change = lambda latent, prompt: (latent, prompt),
        **facts: Any,
    ) -> Any:
        """One step; `facts` are of both prompts, for the model besides their text."""
        self.probe.calls.clear()
        size = {"batch": batch, "frames": frames, "sounds": sounds}
        latent = transformers.latent(self.kind, height, width, **size)
        positive = transformers.conditioning(self.kind, tokens, **facts)
        length = negative_tokens or tokens
        negative = transformers.conditioning(self.kind, length, seed=2, **facts)
        changed, positive = change(latent, positive)
        _, negative = change(latent, negative)
        result = self.host.sample(
            self.model if model is None else model,
            positive,
            negative,
            latent=changed,
            steps=steps,
            cfg=cfg,
            scheduler="simple",
        )
        parts = result.unbind() if getattr(result, "is_nested", False) else [result]
        assert all(part.isfinite().all() for part in parts)
        return parts

    def check(
        self,
        *size: int,
        left: dict[str, int] | None = None,
        tolerance: float = TOLERANCE,
        **options: Any,
    ) -> dict[str, Any]:
        """Sample; every call was compiled but for places that are `left` for a reason in words, and
        the host's within tolerance, at no build.

        Returns:
            The report.
        """
        engine, model = self.lab.engine, options.get("model", self.model)
        jobs, before = self.lab.jobs(), engine.report(model)["calls"]
        self.sample(*size, **options)
        report: dict[str, Any] = engine.report(model)
        assert self.lab.jobs() == jobs
        reasons = {entry["reason"]: entry["places"] for entry in report["eager"]}
        assert reasons == (left or {})
        compiled = report["calls"]["compiled"] - before["compiled"]
        served = self.blocks - sum(reasons.values())
        assert compiled == len(self.probe.calls) * served
        assert self.probe.calls
        assert max(call.error for call in self.probe.calls) <= tolerance
        return report


# --- what nodes put into a latent and a prompt ----------------------------------------------------


def video_of(latent: dict[str, Any]) -> torch.Tensor:
    samples = latent["samples"]
    video: torch.Tensor = samples.unbind()[0] if samples.is_nested else samples
    return video


def with_video(latent: dict[str, Any], video: torch.Tensor, mask: Any = None) -> dict[str, Any]:
    """The latent with another video, as ConcatAVLatent makes it of one with a noise mask."""
    from comfy_extras.nodes_lt import LTXVConcatAVLatent

    one: dict[str, Any] = {"samples": video}
    if mask is not None:
        one["noise_mask"] = mask
    if not latent["samples"].is_nested:
        return one
    audio = {"samples": latent["samples"].unbind()[1]}
    result: dict[str, Any] = LTXVConcatAVLatent.execute(one, audio).result[0]
    return result


def known_frame(value: float = 0.0, part: float = 1.0) -> Change:
    """The first frame is there already, to be denoised by so much; all of it or an upper part."""

    def change(latent: dict[str, Any], prompt: Any) -> tuple[dict[str, Any], Any]:
        video = video_of(latent).clone()
        video[:, :, :1] = torch.randn(video[:, :, :1].shape, generator=generator(4))
        mask = torch.ones(video.shape[0], 1, *video.shape[2:])
        mask[:, :, :1, : max(1, int(part * video.shape[3]))] = value
        return with_video(latent, video, mask), prompt

    return change


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def guided(*strengths: float) -> Change:
    """A guide of one frame for each of these strengths, as LTXVAddGuide puts them."""

    def change(latent: dict[str, Any], prompt: Any) -> tuple[dict[str, Any], Any]:
        from comfy_extras import nodes_lt

        video = video_of(latent)
        mask = torch.ones(video.shape[0], 1, video.shape[2], 1, 1)
        mask = mask.expand(-1, -1, -1, *video.shape[3:]).clone()
        whole = video
        for number, strength in enumerate(strengths):
            guide = torch.randn(video[:, :, :1].shape, generator=generator(number))
            prompt, _, whole, mask = nodes_lt.LTXVAddGuide.append_keyframe(
                prompt, prompt, 8 * number, whole, mask, guide, strength, (8, 32, 32)
            )
            sides = list(guide.shape[2:])
            prompt, _ = nodes_lt._append_guide_attention_entry(
                prompt, prompt, guide[0, 0].numel(), sides, strength=strength, attention_mask=None
            )
        return with_video(latent, whole, mask), prompt

    return change
