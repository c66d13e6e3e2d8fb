"""A small transformer through Compile Model beside eager, call by call."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, Probe

#: Where the host keeps a model's own module.
ROOT = "diffusion_model"


class Expected(NamedTuple):
    """What a small model has: kinds of regions, places, attentions in each call, and how many
    places are there for another way to call their blocks.
    """

    kinds: int
    places: int
    attentions: int
    others: int = 0


EXPECTED = {
    "flux1": Expected(3, 5, 4),
    "flux_fill": Expected(3, 5, 4),
    "flux2": Expected(3, 5, 4),
    "chroma": Expected(2, 4, 4),
    "zimage": Expected(3, 7, 6),
    "lumina2": Expected(3, 7, 6),
    "qwen": Expected(3, 5, 2, 2),
    "qwen_layered": Expected(3, 5, 2, 2),
    # Of two calls, the host's and ours; the first computes what comes before the image, too.
    "qwen21": Expected(1, 2, 3),
    "krea": Expected(4, 7, 6),
    "sd3": Expected(4, 5, 5),
    "wan": Expected(2, 3, 4),
    "wan_image": Expected(2, 3, 6),
    "wan_5b": Expected(3, 5, 4, 2),
    "wan_vace": Expected(3, 5, 8),
    "wan_camera": Expected(2, 3, 4),
    "wan_animate": Expected(2, 6, 15),
    "wan_s2v": Expected(2, 3, 4),
    "wan_humo": Expected(2, 3, 6),
    "wan_dancer": Expected(2, 4, 7, 1),
    "wan_animate2": Expected(4, 7, 8, 2),
    "wan_scail": Expected(2, 3, 6),
    "wan_scail2": Expected(2, 3, 6),
    "hunyuan": Expected(3, 5, 6),
    "hunyuan_15": Expected(3, 5, 6),
    "hunyuan_flow": Expected(3, 5, 6),
    "hunyuan_image": Expected(3, 5, 6),
    "anima": Expected(2, 3, 4),
    "predict2": Expected(2, 3, 4),
    "predict2_video": Expected(3, 5, 4, 2),
}


def keeping_nothing(model: Any) -> Any:
    """A clone of a Qwen-Image 2.1 that keeps nothing of a step for the next one."""
    clone = model.clone()
    clone.model_options["transformer_options"]["qwen_image21_cache"] = {"device": "off"}
    return clone


class Run:
    """A small transformer under a probe, with Compile Model inside the probe."""

    def __init__(self, host: Host, lab: Lab, kind: str, plain: Any = None, **loading: Any) -> None:
        self.host, self.lab, self.kind = host, lab, kind
        self.expected = EXPECTED[kind]
        self.probe = Probe()
        self.plain = self.probe.attach(plain or transformers.load(kind, **loading))
        self.model = lab.compiled(self.plain)

    def sample(
        self,
        height: int = 8,
        width: int = 8,
        batch: int = 1,
        tokens: int = 13,
        *,
        model: Any = None,
        frames: int = 1,
        latent: Any = None,
        negative_tokens: int | None = None,
        cfg: float = 3.0,
        **facts: Any,
    ) -> torch.Tensor:
        """One step; `facts` are of both prompts, for the model besides their text."""
        self.probe.calls.clear()
        size = {"height": height, "width": width, "batch": batch, "frames": frames}
        result: torch.Tensor = self.host.sample(
            self.model if model is None else model,
            transformers.conditioning(self.kind, tokens, **facts),
            transformers.conditioning(self.kind, negative_tokens or tokens, seed=2, **facts),
            latent=transformers.latent(self.kind, **size) if latent is None else latent,
            steps=1,
            cfg=cfg,
            scheduler="simple",
        )
        assert result.isfinite().all()
        return result

    def key(self) -> str:
        """The name of a product's weight within a block, for a LoRA."""
        if self.kind in ("zimage", "lumina2"):
            return "diffusion_model.layers.1.feed_forward.w1.weight"
        return next(
            name
            for name, value in self.plain.model.diffusion_model.named_parameters(prefix=ROOT)
            if re.match(rf"{ROOT}\.\w*blocks\.1\.", name) and value.dim() == 2
        )

    def check(self, *size: int, **options: Any) -> None:
        """Sample; every call was all compiled and the host's within tolerance, at no build."""
        engine, model = self.lab.engine, options.get("model", self.model)
        jobs, before = self.lab.jobs(), engine.report(model)["calls"]
        self.sample(*size, **options)
        report = engine.report(model)
        assert self.lab.jobs() == jobs
        assert report["regions"]["eager"] == 0, report["eager"]
        assert report["calls"]["eager"] == before["eager"]
        modules = self.expected.places - self.expected.others
        compiled = report["calls"]["compiled"] - before["compiled"]
        assert compiled == len(self.probe.calls) * modules > 0
        assert max(call.error for call in self.probe.calls) <= TOLERANCE
