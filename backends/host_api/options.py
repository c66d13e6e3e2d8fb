"""What the host and other nodes put into a call's `transformer_options`.

Relies on the host's `comfy/samplers.py`, `comfy/model_base.py` (`_apply_model`) and
`comfy/ldm/modules/diffusionmodules/openaimodel.py`, which read them. `values` are a call's
arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

#: In a sampler's options: those of the model's calls.
TRANSFORMER = "transformer_options"
#: What the host's EasyCache and LazyCache leave there: their wrappers alone read it.
EASY_CACHE = "easycache"
#: What a model keeps that makes a video block by block: each call adds to it.
_BLOCK_BY_BLOCK = "ar_state"
#: Whether blocks have the weights of those after them brought over (LTX, MiniMax H3).
_AHEAD = "prefetch_dynamic_vbars"
#: What no diffusion model reads in its own forward.
UNREAD = frozenset({"callbacks", EASY_CACHE, _AHEAD, "uuids", "wrappers"})
#: Where nodes put functions of their own.
PATCHES, REPLACEMENTS = "patches", "patches_replace"
ATTENTION = "optimized_attention_override"
NODES = frozenset({PATCHES, REPLACEMENTS, ATTENTION})
#: The sigmas of all steps of the sampler's run, and of its end.
SAMPLE_SIGMAS = "sample_sigmas"
#: Those that its model is evaluated at now: one object for all calls of an evaluation.
_SIGMAS = "sigmas"
#: Which conditionings stand in the rows of a call, one after the other.
CONDITIONINGS = "cond_or_uncond"
#: In a sampler's options: the copies of its model, by the card that each is on.
SEVERAL_CARDS = "multigpu_clones"


def run_sigmas(values: Iterable[Any]) -> torch.Tensor | None:
    """Return the sigmas of the sampler's run, its end included; None if not given."""
    for sigmas in _named(values, SAMPLE_SIGMAS):
        if isinstance(sigmas, torch.Tensor) and sigmas.dim() == 1:
            return sigmas
    return None


def evaluation_sigmas(values: Iterable[Any]) -> torch.Tensor | None:
    """Return the sigmas of a call's evaluation, the same object in all of its calls, or None."""
    return next((each for each in _named(values, _SIGMAS) if isinstance(each, torch.Tensor)), None)


def conditionings(values: Iterable[Any]) -> int:
    """Return how many conditionings a call's rows hold."""
    for found in _named(values, CONDITIONINGS):
        if isinstance(found, list) and found:
            return len(found)
    return 1


@contextlib.contextmanager
def bringing_nothing_ahead(values: Iterable[Any]) -> Iterator[None]:
    """Stop blocks from fetching the next one's weights, all there: asking costs microseconds."""
    asked = [each for each in values if type(each) is dict and each.get(_AHEAD)]
    for each in asked:
        each[_AHEAD] = False
    try:
        yield
    finally:
        for each in asked:
            each[_AHEAD] = True


def names_of(values: Iterable[Any]) -> frozenset[str]:
    """Return the names of a call's options, if only the model's own code reads them."""
    for each in values:
        if type(each) is dict and CONDITIONINGS in each:
            names = (name for name in each if type(name) is str)
            return frozenset() if each.get(ATTENTION) else frozenset(names)
    return frozenset()


def have_functions(values: Iterable[Any]) -> bool:
    """Tell whether nodes pass functions that the model's own code calls."""
    return any(
        each.get(name) for each in values if type(each) is dict for name in (PATCHES, REPLACEMENTS)
    )


def _named(values: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the values under a name in plain dicts among a call's arguments."""
    return (value[name] for value in values if type(value) is dict and name in value)


def is_block_by_block(options: Mapping[str, Any]) -> bool:
    """Tell whether a call is of a video made block by block, which keeps state in its model."""
    return options.get(_BLOCK_BY_BLOCK) is not None


def window_of(options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the frames of a call's context window, empty without one."""
    return tuple(getattr(options.get("context_window"), "index_list", ()))
