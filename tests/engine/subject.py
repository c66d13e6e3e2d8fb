"""A small model with and without Compile Model, and the comparison that most engine tests make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, Once, relative

Patch = Callable[[Any], Any]


def unpatched(model: Any) -> Any:
    """The patch that does nothing."""
    return model


class Subject:
    """One checkpoint, its compiled clone, and two prompts."""

    def __init__(self, lab: Lab, host: Host, kind: str) -> None:
        self.lab = lab
        self.host = host
        self.model, self.clip, self.vae = host.load(kind)
        self.positive = host.encode(self.clip, "a cat on a hill")
        self.negative = host.encode(self.clip, "blurry")
        self.compiled = lab.compiled(self.model)
        #: The model's own image.
        self._plain = Once(lambda **sampling: self.sample(self.model, **sampling))

    @property
    def unet(self) -> Any:
        return self.model.model.diffusion_model

    @property
    def blocks(self) -> int:
        """How many transformer blocks the UNet has."""
        names = [type(module).__name__ for module in self.unet.modules()]
        return names.count("BasicTransformerBlock")

    def sample(self, model: Any, **sampling: Any) -> torch.Tensor:
        """Sample with random numbers that some patches draw pinned too."""
        torch.manual_seed(7)
        positive = sampling.pop("positive", self.positive)
        negative = sampling.pop("negative", self.negative)
        latent: torch.Tensor = self.host.sample(model, positive, negative, **sampling)
        return latent

    def report(self, model: Any) -> dict[str, Any]:
        report: dict[str, Any] = self.lab.engine.report(model)
        return report

    def check(
        self, patch: Patch = unpatched, *, when_missing: str = "wait", **sampling: Any
    ) -> dict[str, Any]:
        """Assert that a patched compiled model samples what the patched model samples.

        Both orders: the patch on top of Compile Model, and Compile Model on top of the patch.

        Args:
            patch: what another node does to a MODEL; called anew for each of the models.
            when_missing: "never" keeps a patch that makes new kinds from having them built.

        Returns:
            The report after the last run.
        """
        sampling = {"steps": 2, **sampling}
        eager = self.sample(patch(self.model), **sampling)
        assert eager.isfinite().all()
        if patch is not unpatched:
            assert relative(eager, self._plain(**sampling)) > 1e-3, "the patch did nothing"
        plain = self.lab.compiled(self.model, when_missing=when_missing)
        on_top = self.lab.compiled(patch(self.model), when_missing=when_missing)
        self.lab.settle()
        for ours in (on_top, patch(plain)):
            before = self.report(ours)["calls"]["compiled"]
            latent = self.sample(ours, **sampling)
            error = relative(latent, eager)
            assert error < TOLERANCE, (error, self.report(ours)["eager"])
            assert self.report(ours)["calls"]["compiled"] > before
        return self.report(ours)


def reasons(report: dict[str, Any]) -> dict[str, int]:
    """{reason: number of places that run eager for it}."""
    return {entry["reason"]: entry["places"] for entry in report["eager"]}
