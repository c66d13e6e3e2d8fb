"""A step of a model that is not loaded: by its file's settings, on fakes from the start, for a
developer without a card for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import LearnError
from ..host_api.detected import root_of
from ..reasons import of
from ..torch_api.fakes import sized_fakes
from .watching import Watched, task

#: Tokens of its text.
_TOKENS = 13


def lesson(
    name: str,
    settings: Mapping[str, Any],
    latent: tuple[int, ...],
    inputs: Any,
    text: int | None,
) -> dict[str, Any]:
    """Return a worker's task.

    Args:
        name: of the model's class in the host's list.
        settings: as the host's detection reads them from its file.
        latent: shape of one of its latents.
        inputs: returns, for a root, its settings and a latent's shape, what its call takes besides,
            or None (`families.catalogue.empty_inputs`).
        text: width of a text's tokens, if not known otherwise.

    Raises:
        LearnError: it cannot be built or called without data.
    """
    with sized_fakes(), torch.no_grad():
        root = root_of(name, settings, torch.float32)
        given = inputs(root, settings, latent)
        if given is None:
            if text is None:
                raise LearnError(of("learned_no_text"))
            given = {"c_crossattn": (latent[0], _TOKENS, text)}
        made = {n: torch.empty(v) if isinstance(v, tuple) else v for n, v in given.items()}
        x = torch.empty(latent)
        if (beside := made.pop("c_concat", None)) is not None:
            x = torch.cat((x, beside), 1)
        context = made.pop("c_crossattn")
        seen = Watched(root, _placed)
        seen.forward(x, torch.empty(latent[0]), context=context, transformer_options={}, **made)
    return dict(json.loads(json.dumps(task(name, settings, torch.float32, seen.facts))))


def _placed(own: Any, placed: Any) -> Any:
    """Make a call with forwards in place."""
    for module, name, forward in placed:
        module.__dict__[name] = forward
    try:
        return own()
    finally:
        for module, name, _ in placed:
            module.__dict__.pop(name, None)
