"""Prompts that begin and end within a run, on models whose denoised latent lies on a line: there a
forecast must be what would have been computed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_backends.stepcache.forecast import Forecast
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from ..deepcache.sampling import both, during
from .small import Small
from .stepped import evaluations, stepped


class _Lines(Small):
    """A model whose velocity is a line in its share of noise, another one for each prompt."""

    def __init__(self, host: Host, kind: str) -> None:
        from comfy.patcher_extension import WrappersMP

        super().__init__(host, kind)
        self.model = self.model.clone()
        self.model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "tests.lines", self._line)

    def node(self, class_type: str, **given: Any) -> Any:
        return self.host.node(class_type, **given)[0]

    def _line(
        self, executor: Any, model: Any, conds: Any, x: Any, sigma: Any, options: Any
    ) -> list[torch.Tensor]:
        s = sigma[:1].float().view(-1, *[1] * (x.dim() - 1))
        found = []
        for each in conds:
            on = [n for n, one in enumerate(each or ()) if self._is_on(one, float(sigma[0]))]
            made = [x - s * (begin + s * slope) for begin, slope in map(self._of, on)]
            found.append(sum(made[1:], made[0]) / len(made) if made else torch.zeros_like(x))
        return found

    @staticmethod
    def _is_on(conditioning: Any, sigma: float) -> bool:
        start, end = (conditioning.get(f"timestep_{which}") for which in ("start", "end"))
        return (start is None or sigma <= start) and (end is None or sigma >= end)

    def _of(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a prompt, by its place among others."""
        numbers = torch.Generator().manual_seed(number)
        shape = transformers.latent(self.kind, 8, 8)["samples"].shape
        return torch.randn(shape, generator=numbers), torch.randn(shape, generator=numbers)


@pytest.fixture(scope="module", params=["flux1", pytest.param("wan", marks=pytest.mark.slow)])
def lines(host: Host, request: pytest.FixtureRequest) -> _Lines:
    return _Lines(host, request.param)


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "res_multistep"])
@pytest.mark.parametrize("speed", [1.8, 2.4, 4.0])
@pytest.mark.parametrize("at", [0.2, 0.45, 0.7])
def test_a_line_that_is_exact_is_so_behind_a_boundary(
    lines: _Lines, at: float, speed: float, sampler: str
) -> None:
    """It is not cut short there, whatever the speed; at 2.4 and less nowhere in a run."""
    prompts = both(
        lines, during(lines, lines.prompt, 0.0, at), during(lines, lines.negative, at, 1.0)
    )
    first = {"first_full": 8} if speed > 3 else {}  # before the boundary a user may go far

    def sample(model: Any) -> torch.Tensor:
        latent = transformers.latent(lines.kind, 8, 8)
        given = {"sampler": sampler, "scheduler": "simple", "cfg": 1.0, "latent": latent}
        image: torch.Tensor = lines.host.sample(model, prompts, prompts, steps=24, **given)
        return image

    plain = sample(lines.model)
    ours = stepped(lines.model, speed=speed, forecast=Forecast.LINE, **first)
    found = sample(ours)
    assert evaluations(ours)["forecast"] >= 8
    assert (found - plain).norm() <= 1e-5 * plain.norm()
