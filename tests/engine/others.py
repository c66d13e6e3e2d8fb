"""Small transformers of which others replaced layers, with and without Compile Model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .subject import reasons

ROOT = "diffusion_model"
REPLACED = "another node replaces the forward of a Linear"

Patch = Callable[[Any], Any]


class Model:
    """One small transformer with and without Compile Model, and what others do to both."""

    def __init__(
        self, host: Host, lab: Lab, kind: str, plain: Any = None, *, compiles: bool = True
    ) -> None:
        self.host, self.lab, self.kind = host, lab, kind
        self.plain = transformers.load(kind) if plain is None else plain
        self.compiled = lab.compiled(self.plain) if compiles else None

    def sample(self, model: Any, *, steps: int = 2, **facts: Any) -> torch.Tensor:
        torch.manual_seed(3)
        latent = transformers.latent(self.kind, 8, 8)
        result: torch.Tensor = self.host.sample(
            model,
            transformers.conditioning(self.kind, 13, **facts),
            transformers.conditioning(self.kind, 13, seed=2, **facts),
            latent=latent,
            steps=steps,
            cfg=3.0,
            scheduler="simple",
        )
        assert result.isfinite().all()
        return result

    def report(self, model: Any) -> dict[str, Any]:
        report: dict[str, Any] = self.lab.engine.report(model)
        return report

    def settled(self, model: Any) -> None:
        """Wait until the graphs for what others have in it are there."""
        self.lab.wait_until(lambda: self.lab.is_settled(model))
        self.lab.settle()

    def check(self, patch: Patch, *, tolerance: float = TOLERANCE, **facts: Any) -> dict[str, int]:
        """Assert that a patch acts as without us, behind and before Compile Model, at most one set
        of graphs for both, and that all is as before without it.

        Returns:
            The counts of layers that are called, by why.
        """
        engine = self.lab.engine
        before = self.sample(self.plain, **facts)
        theirs = patch(self.plain)
        eager = self.sample(theirs, **facts)
        assert relative(eager, before) > 1e-3, "the patch did nothing"
        behind = patch(self.compiled)
        assert relative(self.sample(behind, **facts), eager) < tolerance
        self.settled(behind)
        jobs = self.lab.jobs()
        assert relative(self.sample(behind, **facts), eager) < tolerance
        assert reasons(self.report(behind)) == {}, self.report(behind)["misses"]
        found = called(self.report(behind))
        ahead = self.lab.compiled(theirs)
        for _ in range(2):
            calls = self.report(ahead)["calls"]["compiled"]
            assert relative(self.sample(ahead, **facts), eager) < tolerance
            assert self.report(ahead)["calls"]["compiled"] > calls
        assert reasons(self.report(ahead)) == {}
        assert called(self.report(ahead)) == found
        assert relative(self.sample(self.compiled, **facts), before) < tolerance
        report = engine.report(self.compiled)
        assert reasons(report) == {} and not called(report).keys() & found.keys()
        assert self.lab.jobs() == jobs
        return found


def called(report: dict[str, Any]) -> dict[str, int]:
    """{why: number of layers that graphs call for it}."""
    found: dict[str, int] = {}
    for kind in report["kinds"]:
        for layer in kind["layers"]:
            found[layer["why"]] = found.get(layer["why"], 0) + layer["count"]
    return found


def products(model: Any, pattern: str = "") -> list[str]:
    """Names of the products within the blocks of a transformer."""
    return [
        name
        for name, module in model.model.named_modules()
        if type(module).__name__ == "Linear"
        and name.startswith(ROOT)
        and re.search(r"\.(layers|\w*blocks|\w*refiner)\.", name)
        and re.search(pattern, name)
    ]


def lora_of(
    model: Any, names: list[str], *, seed: int = 9, rank: int = 4, scale: float = 1.0
) -> dict[str, Any]:
    """A LoRA of some products, as a file has it."""
    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for name in names:
        layer = model.model.get_submodule(name)
        rows, columns = layer.out_features, layer.in_features
        lora[f"{name}.lora_up.weight"] = scale * torch.randn(rows, rank, generator=generator)
        down = torch.randn(rank, columns, generator=generator)
        lora[f"{name}.lora_down.weight"] = down / columns**0.5
    return lora


def bypassed(lora: dict[str, Any], strength: float = 1.0) -> Patch:
    """What the bypass loaders do to a MODEL."""

    def patch(model: Any) -> Any:
        import comfy.sd

        return comfy.sd.load_bypass_lora_for_models(model, None, lora, strength, 0.0)[0]

    return patch


class Counting:
    """Others' code at several places of a model, which counts its calls together: what a part
    gives hangs on how many came before.

    Attributes:
        calls: names of what was called, since `begin`.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.clear()

    def around(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            self.calls.append(name)
            return forward(*args, **named) * (1 + 0.05 * len(self.calls))

        return counted

    def attend(self, function: Any, *args: Any, **named: Any) -> Any:
        """What a node chooses as attention, which gives the same each time: where a graph is
        compared the host's maths ask for it, too.
        """
        self.calls.append("attention")
        return 0.5 * function(*args, **named)
