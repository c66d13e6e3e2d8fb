"""Nodes whose code calls a model's blocks, and gives parts of these other forwards meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .others import Model
from .subject import Subject, reasons

KEY = "diffusion_model.forward"


@contextmanager
def swapped(parts: list[Any], forward: Callable[..., Any], **bound: Any) -> Iterator[None]:
    """Parts with another forward, bound to each."""
    before = [part.forward for part in parts]
    for part in parts:
        part.forward = MethodType(partial(forward, **bound), part)
    try:
        yield
    finally:
        for part, theirs in zip(parts, before, strict=True):
            part.forward = theirs


def louder(part: Any, x: Any, context: Any, scale: float = 1.0, **options: Any) -> Any:
    return scale * type(part).forward(part, x, context, **options)


def cross(root: Any) -> list[Any]:
    return [block.cross_attn for block in root.blocks]


def by_root(model: Any) -> Any:
    """A forward of the root's that gives all blocks another attention for as long as it runs."""
    clone, root = model.clone(), model.model.diffusion_model

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        with swapped(cross(self), louder, scale=3.0):
            return type(self).forward(self, *args, **named)

    clone.add_object_patch(KEY, MethodType(forward, root))
    return clone


def by_method(model: Any) -> Any:
    """The same in a method that the root's forward calls."""
    clone, root = model.clone(), model.model.diffusion_model

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        with swapped(cross(self), louder, scale=3.0):
            return type(self).forward_orig(self, *args, **named)

    clone.add_object_patch("diffusion_model.forward_orig", MethodType(forward, root))
    return clone


def by_block(model: Any) -> Any:
    """What is put around the last block gives that one another attention."""
    clone, blocks = model.clone(), model.model.diffusion_model.blocks
    last = len(blocks) - 1

    def around(args: Any, extra: Any) -> Any:
        with swapped([blocks[last].cross_attn], louder, scale=3.0):
            return extra["original_block"](args)

    clone.set_model_patch_replace(around, "dit", "double_block", last)
    return clone


@pytest.mark.parametrize("patch", [by_root, by_method, by_block])
def test_a_part_replaced_within_a_step_is_called(
    host: Host, shared: Lab, patch: Callable[[Any], Any]
) -> None:
    here = Model(host, shared, "wan")
    before = here.sample(here.plain)
    assert relative(here.sample(here.compiled), before) < TOLERANCE
    eager = here.sample(patch(here.plain))
    assert relative(eager, before) > 1e-2
    patched = patch(here.compiled)
    for _ in range(2):
        assert relative(here.sample(patched), eager) < TOLERANCE
        here.settled(patched)
    assert reasons(here.report(patched)) == {}
    assert relative(here.sample(here.compiled), before) < TOLERANCE
    assert reasons(here.report(here.compiled)) == {}


def mixed(part: Any, x: Any, context: Any, **options: Any) -> Any:
    """Attend to the first texts, one for each row, and a little to the second ones."""
    rows = len(x)
    assert len(context) == 2 * rows
    forward = type(part).forward
    options.pop("value", None)
    return forward(part, x, context[:rows], **options) - 0.3 * forward(
        part, x, context[rows:], **options
    )


def two_texts(model: Any) -> Any:
    """A forward of the root's that gives blocks two texts for each row, and what takes these."""
    clone, root = model.clone(), model.model.diffusion_model
    name = "cross_attn" if hasattr(root, "blocks") else "attn2"
    parts = [part for path, part in root.named_modules() if path.endswith(f".{name}")]

    def forward(self: Any, x: Any, timestep: Any, context: Any, *args: Any, **named: Any) -> Any:
        context = torch.cat((context, context.flip(1)))
        with swapped(parts, mixed):
            return type(self).forward(self, x, timestep, context, *args, **named)

    clone.add_object_patch(KEY, MethodType(forward, root))
    return clone


def table_of_each(model: Any) -> Any:
    """A rotation table for each row, each another one."""
    clone, root = two_texts(model), model.model.diffusion_model

    def rope_encode(self: Any, *args: Any, **named: Any) -> Any:
        table = type(self).rope_encode(self, *args, **named)
        return torch.cat((table, table.roll(1, dims=1)))

    clone.add_object_patch("diffusion_model.rope_encode", MethodType(rope_encode, root))
    return clone


@pytest.mark.parametrize("patch", [two_texts, table_of_each])
def test_a_part_gets_more_texts_and_tables_than_the_model_makes(
    host: Host, shared: Lab, patch: Callable[[Any], Any]
) -> None:
    here = Model(host, shared, "wan")
    eager = here.sample(patch(here.plain))
    assert relative(eager, here.sample(here.plain)) > 1e-2
    patched = patch(here.compiled)
    for _ in range(4):
        assert relative(here.sample(patched), eager) < TOLERANCE
        shared.settle_all(patched)
    assert reasons(here.report(patched)) == {}
    jobs = shared.jobs()
    assert relative(here.sample(patched), eager) < TOLERANCE
    assert shared.jobs() == jobs


def test_a_unets_block_gets_more_texts(host: Host, lab: Lab) -> None:
    subject = Subject(lab, host, "narrow15")
    eager = subject.sample(two_texts(subject.model))
    assert relative(eager, subject.sample(subject.model)) > 1e-2
    patched = two_texts(subject.compiled)
    for _ in range(3):
        assert relative(subject.sample(patched), eager) < TOLERANCE
        lab.settle_all(patched)
    assert reasons(subject.report(patched)) == {}
    assert subject.report(patched)["regions"]["compiled"] == 32
