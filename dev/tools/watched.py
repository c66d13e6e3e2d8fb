"""One real step of a small transformer, watched: what a worker learns from."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from warmgraph_backends.host_api.detected import detected
from warmgraph_backends.learning.watching import Watched, task
from warmgraph_backends.runtime.placing import Placing

from . import small_transformers as transformers
from .inprocess import Host

#: Sizes of a call: height, width, batch, tokens of the text, frames.
FIRST = (8, 8, 1, 13, 1)
#: Of which no step by a text and a latent alone is one.
_MORE = ("wan_", "flux_fill")


def kinds() -> list[str]:
    """Return the small transformers of this host that a text and a latent are enough for."""
    return [
        kind
        for kind in transformers.KINDS
        if transformers.is_there(kind) and (kind == "wan_5b" or not kind.startswith(_MORE))
    ]


def sample(host: Host, kind: str, model: Any, sizes: tuple[int, ...]) -> torch.Tensor:
    """Make one step by the host's sampler."""
    height, width, batch, tokens, frames = sizes
    latent = transformers.latent(kind, height, width, batch=batch, frames=frames)
    given = transformers.conditioning(kind, tokens)
    result: torch.Tensor = host.sample(model, given, given, steps=1, cfg=1.0, latent=latent)
    return result


def watched(root: torch.nn.Module, call: Callable[[], Any]) -> Any:
    """Return what was seen of the first call of a root module, after a trip through JSON."""
    seen = Watched(root, lambda own, placed: Placing().run(own, placed))
    Placing().run(call, seen.placed())
    return json.loads(json.dumps(seen.facts))


def lesson(
    host: Host,
    kind: str,
    *,
    model: Any = None,
    sizes: tuple[int, ...] = FIRST,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return what a worker learns from, of a small transformer.

    Args:
        model: a MODEL of the kind; a new one where none is given.
        sizes: of the call.
        dtype: that the model computes in.
    """
    model = model or transformers.load(kind, dtype=dtype)
    facts = watched(model.model.diffusion_model, lambda: sample(host, kind, model, sizes))
    found = task(*detected(model.model), dtype, facts)
    return dict(json.loads(json.dumps(found)))
