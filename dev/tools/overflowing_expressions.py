"""Expressions of the host's that bound what overflows in float16, and numbers that do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from .overflowing import MOST

WIDTH = 64

Expression = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _bounded(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=MOST, neginf=-MOST)


def _wide_and_back(x: torch.Tensor, g: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """An explicit rounding between two in float32."""
    return ((x.float() * 300).half().float() * 1e-3).half() + torch.isinf(x * g)


def _unrounded_within(x: torch.Tensor, g: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """One operator, which rounds once; a bound reads what it gives."""
    return _bounded(torch.addcmul(x, g, o)[:, 1:])


#: The host's forms: `lumina/model.py`, `flux/{layers,model}.py` and `minimax/vae.py` bound so, and
#: what else makes a finite number of an infinity.
EXPRESSIONS: dict[str, Expression] = {
    "silu": lambda x, g, o: _bounded(functional.silu(g) * o),
    "gated": lambda x, g, o: _bounded(x + g * o),
    "addcmul": _unrounded_within,
    "infinite": lambda x, g, o: torch.where(torch.isinf(g * o), 0, g * o),
    "finite": lambda x, g, o: torch.where(torch.isfinite(g * o), g * o, x),
    "not a number": lambda x, g, o: torch.where(torch.isnan(g * o - g * g), 1, x),
    "norm": lambda x, g, o: _bounded(functional.rms_norm(g * o, [WIDTH], x[0])),
    "mean": lambda x, g, o: (g * o).mean(-1).nan_to_num(posinf=MOST),
    "sum": lambda x, g, o: _bounded((g * 8 + x * 0).sum(-1)),
    "clamp": lambda x, g, o: (x + g * o).clamp(-448, 448),
    "scaled clamp": lambda x, g, o: (g * o * 1e-3).clamp(-1000, 1000),
    "divided": lambda x, g, o: x / (g * o),
    "root": lambda x, g, o: x * torch.rsqrt((g * g).mean(-1, keepdim=True)),
    "gate": lambda x, g, o: _bounded(x + torch.tanh(g * o * 1e-5) * o),
    "joined": lambda x, g, o: _bounded(torch.cat([g * o, x], 1)[:, WIDTH // 2 :]),
    "wide": _wide_and_back,
    "product": lambda x, g, o: _bounded(x + functional.linear(g, o[:1].expand(WIDTH, WIDTH))),
}
#: Elements of x, g and o.
VALUES = {
    "one rounding": (40000.0, 100.0, 300.0),
    "two roundings": (-40000.0, 100.0, 1000.0),
    "large": (300.0, 300.0, 300.0),
    "below zero": (-300.0, 300.0, -300.0),
    "infinite": (float("inf"), -300.0, 300.0),
    "no number": (float("nan"), 300.0, 300.0),
    "sound": (0.5, -1.25, 0.75),
}


class Region(torch.nn.Module):
    """One of them, as a block of the host's is traced."""

    def __init__(self, expression: Expression) -> None:
        super().__init__()
        self._expression = expression

    def forward(self, x: torch.Tensor, g: torch.Tensor, o: torch.Tensor) -> tuple[torch.Tensor]:
        return (self._expression(x, g, o),)


def cases(device: str) -> dict[str, list[torch.Tensor]]:
    """x, g and o of three rows: of one number each, and of random ones."""
    generator = torch.Generator().manual_seed(0)
    made = {
        name: [torch.full((3, WIDTH), value, dtype=torch.float16) for value in values]
        for name, values in VALUES.items()
    }
    made["spread"] = [(300 * torch.randn(3, WIDTH, generator=generator)).half() for _ in range(3)]
    return {name: [each.to(device) for each in given] for name, given in made.items()}
