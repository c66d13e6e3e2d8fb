"""A model under control of one network, plain and compiled, and what each network returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from warmgraph_tools import checkpoints
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, left_behind, relative

Residuals = dict[str, list[torch.Tensor | None]]
Wire = Callable[[Any], tuple[Any, Any]]


class Merge(NamedTuple):
    """One network's result as it reached `control_merge`: whose, and its tensors."""

    control: Any
    residuals: Residuals


@contextmanager
def recorded() -> Iterator[list[Merge]]:
    """Keep what every network returns, before strength is multiplied into it."""
    from comfy.controlnet import ControlBase

    merges: list[Merge] = []
    host = ControlBase.control_merge

    def merge(self: Any, control: Residuals, *rest: Any, **named: Any) -> Any:
        clones = {k: [None if t is None else t.clone() for t in ts] for k, ts in control.items()}
        merges.append(Merge(self, clones))
        return host(self, control, *rest, **named)

    ControlBase.control_merge = merge
    try:
        yield merges
    finally:
        ControlBase.control_merge = host


class Controlled:
    """One checkpoint, one control file, two prompts, a hint, and the compiled control network."""

    def __init__(self, lab: Lab, host: Host, kind: str = "narrowxl", file: str = "") -> None:
        self.lab, self.host = lab, host
        self.model, clip, self.vae = host.load(kind)
        self.positive = host.encode(clip, "a cat on a hill")
        self.negative = host.encode(clip, "blurry")
        self.clip = clip
        self.image = torch.rand(1, 72, 104, 3, generator=torch.Generator().manual_seed(0))
        name = file or host.model_file("controlnet", base=kind)
        (self.plain,) = host.node("ControlNetLoader", control_net_name=name)
        self.ours = lab.controlled(self.plain)

    @property
    def network(self) -> Any:
        """The network's module; None where the host makes one at every run."""
        return getattr(self.plain, "t2i_model", None) or getattr(self.plain, "control_model", None)

    def apply(
        self, control: Any, conditions: tuple[Any, Any] | None = None, **options: Any
    ) -> tuple[Any, Any]:
        """(positive, negative) under a control, by the host's Apply ControlNet."""
        given = {"image": self.image, **options}
        return self.host.control(conditions or (self.positive, self.negative), control, **given)

    def sample(self, conditions: tuple[Any, Any], model: Any = None, **options: Any) -> Any:
        size = {"width": 104, "height": 72, "steps": 2}
        return self.host.sample(model or self.model, *conditions, **{**size, **options})

    def check(self, wire: Wire | None = None, **sampling: Any) -> torch.Tensor:
        """Assert that ours gives what the plain one gives, in a first step and in an image.

        In a first step both networks get the same inputs, so their results compare directly.

        Args:
            wire: makes (positive, negative) from a control; called for the plain one and ours.

        Returns:
            The image under our control.
        """
        wire = wire or self.apply
        before = self.report()["calls"]
        with recorded() as theirs:
            eager = self.sample(wire(self.plain), **sampling)
        with recorded() as ours:
            image: torch.Tensor = self.sample(wire(self.ours), **sampling)
        assert eager.isfinite().all() and relative(image, eager) < TOLERANCE
        assert len(theirs) == len(ours) > 0
        assert error(ours[0], theirs[0]) < TOLERANCE
        after = self.report()
        assert after["calls"]["eager"] == before["eager"], after["notes"]
        assert after["calls"]["compiled"] > before["compiled"], after["eager"]
        assert self.network is None or left_behind(self.network) == []
        return image

    def report(self, control: Any = None) -> dict[str, Any]:
        report: dict[str, Any] = self.lab.engine.report(control or self.ours)
        return report


def error(ours: Merge, theirs: Merge) -> float:
    """||a - b|| / ||b|| over all that a network returns."""
    pairs = []
    for merge in (ours, theirs):
        tensors = [t for key in sorted(merge.residuals) for t in merge.residuals[key]]
        pairs.append(torch.cat([t.flatten() for t in tensors if t is not None]))
    return relative(*pairs)


def load(host: Host, name: str, base: str = "narrowxl", seed: int = 0) -> Any:
    """A control network from a file of its own name."""
    checkpoints.ensure(host.base / "models", "controlnet", base=base, seed=seed, name=name)
    return host.node("ControlNetLoader", control_net_name=name)[0]
