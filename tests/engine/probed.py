"""A compiled model under a probe, and the one claim that most runs must bear out."""

from __future__ import annotations

from typing import Any

import torch

from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, Probe


class Probed:
    """A narrow SDXL with a probe around it and Compile Model inside the probe, and prompts."""

    def __init__(self, lab: Lab, host: Host, *, seed: int = 0, **options: Any) -> None:
        self.lab, self.host = lab, host
        self.probe = Probe()
        self.plain, self.clip, _ = host.load("narrowxl", seed=seed)
        self.model = lab.compiled(self.probe.attach(self.plain), **options)
        self.positive = host.encode(self.clip, "a cat")
        self.negative = host.encode(self.clip, "blurry")

    @property
    def unet(self) -> Any:
        return self.plain.model.diffusion_model

    def report(self) -> dict[str, Any]:
        """The compiled model's report."""
        report: dict[str, Any] = self.lab.engine.report(self.model)
        return report

    def sample(
        self, model: Any = None, *, size: tuple[int, int] = (8, 8), batch: int = 1, **options: Any
    ) -> torch.Tensor:
        """Sample a latent of `size` (height, width) and keep what the probe saw of this run."""
        self.probe.calls.clear()
        image: torch.Tensor = self.host.sample(
            self.model if model is None else model,
            options.pop("positive", self.positive),
            options.pop("negative", self.negative),
            latent={"samples": torch.zeros(batch, 4, *size)},
            **{"steps": 1, **options},
        )
        assert image.isfinite().all() and image.shape == (batch, 4, *size)
        assert {call.shape[2:] for call in self.probe.calls} in ({size}, set())
        return image

    def check(self, model: Any = None, **options: Any) -> torch.Tensor:
        """Sample, and assert that every UNet call was all compiled and right, at no build.

        Right is within tolerance of the host's own code on the same inputs.
        """
        model = self.model if model is None else model
        engine = self.lab.engine
        builds, before = (self.lab.jobs(), self.lab.builds()), engine.report(model)
        image = self.sample(model, **options)
        after = engine.report(model)
        assert (self.lab.jobs(), self.lab.builds()) == builds
        assert after["builds"] == before["builds"]
        assert after["regions"]["eager"] == 0, after["eager"]
        assert after["calls"]["eager"] == before["calls"]["eager"]
        compiled = after["calls"]["compiled"] - before["calls"]["compiled"]
        assert compiled == len(self.probe.calls) * after["regions"]["total"] > 0
        assert max(call.error for call in self.probe.calls) <= TOLERANCE
        assert not any(call.is_equal for call in self.probe.calls)  # kernels round elsewhere
        return image
