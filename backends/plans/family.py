"""What the package knows of a model family: one record, made in the family's module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..host_api import options
from ..reasons import Reason
from .plan import Form, Plan

#: What a root's call takes besides latent, timestep and options: shapes of empty tensors, and plain
#: values, by `apply_model`'s names. Made from the root, its settings and the latent's shape; None
#: where no empty call is known.
Inputs = dict[str, Any]
MakeInputs = Callable[[Any, Mapping[str, Any], tuple[int, ...]], Inputs | None]


def _never(_: torch.nn.Module) -> bool:
    return False


def _unknown(_root: Any, _settings: Mapping[str, Any], _latent: tuple[int, ...]) -> Inputs | None:
    return None


@dataclass(frozen=True)
class Family:
    """Models that are cut into regions alike.

    Attributes:
        title: the models' name for people.
        roots: by a host class's full name ("module:Class"), the function that cuts such a module,
            or says in a line why it has no regions; a subclass is another class.
        forms: the sorts of regions, by name.
        may_be_captured: tells whether a root's forward is known to be safe in a CUDA graph: it
            neither waits for the GPU nor keeps a tensor beyond the call, except in the root's own
            attributes, which are restored.
        unread: names of the `transformer_options` that a root's own forward does not read; they are
            for patches of other nodes.
        guided_together: whether guidance doubles the batch, because prompts are made equally long.
        empty: makes the arguments of an empty call, for Warm Up.
    """

    title: str
    roots: Mapping[str, Callable[[Any], Plan | Reason]]
    forms: Mapping[str, Form]
    may_be_captured: Callable[[torch.nn.Module], bool] = field(default=_never)
    unread: frozenset[str] = options.UNREAD
    guided_together: bool = False
    empty: MakeInputs = field(default=_unknown)
