"""What packs do to a model while it samples, as small packs of our own; one prompt by chance.

Each function here takes a MODEL and returns a clone, as a node does; `Somebody` tells whose fault
an error is.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Patch = Callable[[Any], Any]


class SomebodyError(Exception):
    """What a pack of ours raises; the host's prompt fails with it, too."""


# --- functions replaced on classes and in modules, for the time of each call ----------------------


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Put functions in place of a class's or module's own, for as long as this lasts."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def norm_of_all_images(x: torch.Tensor, groups: int, weight: Any, bias: Any, eps: float) -> Any:
    """A group norm over all images of a batch at once, as motion models have it over frames."""
    joined = x.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    normed = torch.nn.functional.group_norm(joined, groups, weight, bias, eps)
    return normed.squeeze(0).unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)


def _norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return norm_of_all_images(x, self.num_groups, self.weight, self.bias, self.eps)


def _norm_forward_cast(self: Any, x: torch.Tensor) -> torch.Tensor:
    from comfy.ops import cast_bias_weight, uncast_bias_weight

    weight, bias, stream = cast_bias_weight(self, x, offloadable=True)
    result = norm_of_all_images(x, self.num_groups, weight, bias, self.eps)
    uncast_bias_weight(self, weight, bias, stream)
    return result


def other_norms() -> Any:
    """Replaces the group norm of torch and of the host on their classes."""
    import comfy.ops

    return replaced(
        (torch.nn.GroupNorm, "forward", _norm_forward),
        (comfy.ops.disable_weight_init.GroupNorm, "forward_comfy_cast_weights", _norm_forward_cast),
    )


def other_attention() -> Any:
    """Replaces the attention function that the host's layers call by its name in their module."""
    import comfy.ldm.modules.attention as attention

    host = attention.optimized_attention

    def halved(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        return host(q, k, 0.5 * v, *rest, **named)

    return replaced((attention, "optimized_attention", halved))


def other_operator() -> Any:
    """Replaces one of torch's own operators."""
    functional = torch.nn.functional
    host = functional.scaled_dot_product_attention

    @functools.wraps(host)
    def softer(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        return host(0.5 * q, k, v, *rest, **named)

    return replaced((functional, "scaled_dot_product_attention", softer))


def other_feed_forward() -> Any:
    """Puts a function around the forward of one of the host's classes."""
    from comfy.ldm.modules.attention import FeedForward

    host = FeedForward.forward

    @functools.wraps(host)
    def forward(self: Any, x: torch.Tensor) -> Any:
        return -host(self, x)

    return replaced((FeedForward, "forward", forward))


REPLACEMENTS = (other_norms, other_attention, other_operator, other_feed_forward)


def around_calls(kind: str, enter: Callable[[], Any]) -> Patch:
    """Hold something while the model is called, by one of the host's wrappers."""
    from comfy.patcher_extension import WrappersMP

    def around(executor: Any, *args: Any, **named: Any) -> Any:
        with enter():
            return executor(*args, **named)

    def patch(model: Any) -> Any:
        clone = model.clone()
        clone.add_wrapper_with_key(getattr(WrappersMP, kind), "somebody", around)
        return clone

    return patch


# --- classes swapped in place ---------------------------------------------------------------------


@functools.cache
def other_classes() -> tuple[type, type, type]:
    """Classes of a pack that take the host's instances over, and call one another as the host's
    do not.
    """
    from comfy.ldm.modules.attention import BasicTransformerBlock
    from comfy.ldm.modules.diffusionmodules import openaimodel

    host_walk = openaimodel.forward_timestep_embed

    class OtherResBlock(openaimodel.ResBlock):  # type: ignore[misc]
        def forward(self, x: Any, emb: Any, strength: float) -> Any:
            return x_of(super().forward(x, emb), strength)

    class OtherTransformerBlock(BasicTransformerBlock):  # type: ignore[misc]
        def forward(self, x: Any, context: Any = None, transformer_options: Any = None) -> Any:
            return -super().forward(x, context, transformer_options or {})

    class OtherUNet(openaimodel.UNetModel):  # type: ignore[misc]
        def _forward(self, *args: Any, **named: Any) -> Any:
            with replaced((openaimodel, "forward_timestep_embed", walk)):
                return super()._forward(*args, **named)

    def x_of(x: Any, strength: float) -> Any:
        return x * strength

    def walk(sequence: Any, x: Any, emb: Any, *rest: Any, **named: Any) -> Any:
        for layer in sequence:
            if isinstance(layer, OtherResBlock):
                x = layer(x, emb, 0.8)
            else:
                x = host_walk([layer], x, emb, *rest, **named)
        return x

    return OtherTransformerBlock, OtherResBlock, OtherUNet


def swap_classes(model: Any) -> Any:
    """Give the UNet and its blocks other classes, by object patches."""
    clone = model.clone()
    others = other_classes()
    for name, module in clone.model.named_modules():
        # One that another clone has swapped already is loaded so until this one is.
        swapped = next((o for o in others if type(module) in (o, o.__base__)), None)
        if swapped is not None and name.startswith("diffusion_model"):
            clone.add_object_patch(f"{name}.__class__", swapped)
    return clone


def swap_one_block(model: Any) -> Any:
    """Give one transformer block another class, as the host calls it."""
    clone = model.clone()
    path = "diffusion_model.middle_block.1.transformer_blocks.0"
    clone.add_object_patch(f"{path}.__class__", other_classes()[0])
    return clone


# --- instances ------------------------------------------------------------------------------------


def other_forward(path: str) -> Patch:
    """Put another forward on one module, by an object patch."""

    def patch(model: Any) -> Any:
        clone = model.clone()
        forward = clone.get_model_object(f"{path}.forward")
        clone.add_object_patch(f"{path}.forward", lambda *a, **k: -forward(*a, **k))
        return clone

    return patch


def forward_within(path: str) -> Patch:
    """Put another forward on one module while the model is called, and take it away then."""

    def patch(model: Any) -> Any:
        module = model.model.get_submodule(path)

        @contextmanager
        def enter() -> Iterator[None]:
            before = module.__dict__.get("forward")
            host = module.forward
            module.forward = lambda *args, **named: -host(*args, **named)
            try:
                yield
            finally:
                if before is None:
                    del module.forward
                else:
                    module.forward = before

        return around_calls("APPLY_MODEL", enter)(model)

    return patch


class Motion(torch.nn.Module):
    """A layer of a pack, which mixes the images of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * x.mean(0, keepdim=True)


def with_layers(model: Any) -> Any:
    """Put layers into the UNet's blocks for as long as a model is loaded."""
    from comfy.patcher_extension import PatcherInjection

    layers = [Motion(), Motion()]

    def sequences(patcher: Any) -> list[Any]:
        unet = patcher.model.diffusion_model
        return [unet.input_blocks[1], unet.output_blocks[0]]

    def inject(patcher: Any) -> None:
        for sequence, layer in zip(sequences(patcher), layers, strict=True):
            sequence.insert(1, layer)

    def eject(patcher: Any) -> None:
        for sequence in sequences(patcher):
            sequence.pop(1)

    clone = model.clone()
    clone.set_injections("somebody", [PatcherInjection(inject=inject, eject=eject)])
    return clone


# --- errors ---------------------------------------------------------------------------------------


def raising(kind: str, number: int, *, late: bool) -> Patch:
    """Raise in the given call of a wrapper, before or after the model ran in it."""
    from comfy.patcher_extension import WrappersMP

    def patch(model: Any) -> Any:
        calls = 0

        def around(executor: Any, *args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number and not late:
                raise SomebodyError(f"call {calls} of {kind}")
            result = executor(*args, **named)
            if calls == number:
                raise SomebodyError(f"call {calls} of {kind}, after it")
            return result

        clone = model.clone()
        clone.add_wrapper_with_key(getattr(WrappersMP, kind), "somebody.raises", around)
        return clone

    return patch


# --- a prompt -------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """What one prompt does.

    Attributes:
        words: for a failure's message.
        patches: what other nodes do to the model, in order.
        held: what lasts for the whole run, from outside the model.
        sampling: for `sample`.
        interrupt: after which step the user cancels, if at all.
        asked: whether by the host's flag, which its operators look at; by its exception, if not.
        fresh: whether Compile Model is run anew on top of the patches; below them and kept, if not.
        cached: whether DeepCache lies on top.
        controlled: whether a ControlNet takes part.
    """

    words: str
    patches: tuple[Patch, ...]
    held: Callable[[], Any] | None
    sampling: dict[str, Any]
    interrupt: int | None
    asked: bool
    fresh: bool
    cached: bool
    controlled: bool

    @property
    def swaps(self) -> bool:
        """Whether modules get other classes."""
        return swap_classes in self.patches or swap_one_block in self.patches


BLOCK = "diffusion_model.input_blocks.3.1.transformer_blocks.0"


def draw(chance: random.Random) -> Prompt:
    """Draw a prompt; one in four has no pack at all, and must be as before them."""
    replacement = chance.choice(REPLACEMENTS)
    kind = chance.choice(("DIFFUSION_MODEL", "APPLY_MODEL"))
    wrapper = chance.choice(("DIFFUSION_MODEL", "APPLY_MODEL", "OUTER_SAMPLE", "PREDICT_NOISE"))
    path = chance.choice((BLOCK, "diffusion_model.middle_block.0", f"{BLOCK}.attn1.to_q"))
    steps, late = chance.randint(2, 4), chance.random() < 0.5
    number = 1 if wrapper == "OUTER_SAMPLE" else chance.randint(1, 2)
    every: dict[str, Patch] = {
        f"{replacement.__name__} around {kind}": around_calls(kind, replacement),
        "swap_classes": swap_classes,
        "swap_one_block": swap_one_block,
        f"other_forward of {path}": other_forward(path),
        f"forward_within {path}": forward_within(path),
        "with_layers": with_layers,
        f"raising in {wrapper}": raising(wrapper, number, late=late),
    }
    chosen: list[str] = []
    if chance.random() < 0.75:
        chosen = chance.sample(list(every), chance.choice((1, 1, 2)))
    if {"swap_classes", "swap_one_block"} <= set(chosen):
        chosen.remove("swap_one_block")
    held = chance.choice(REPLACEMENTS) if chance.random() < 0.1 else None
    interrupt = chance.randint(0, steps - 2) if chance.random() < 0.15 else None
    asked, fresh = chance.random() < 0.5, chance.random() < 0.4
    cached, controlled = chance.random() < 0.2, chance.random() < 0.15
    size = chance.choice((64, 72, 104))
    sampling = {
        "steps": steps,
        "batch": chance.choice((1, 2)),
        "width": size,
        "height": chance.choice((64, 88)),
        "cfg": chance.choice((1.0, 6.0)),
        "seed": chance.randint(0, 999),
    }
    words = ", ".join(
        [
            *(chosen or ["no pack"]),
            *([f"{held.__name__} for the whole run"] if held else []),
            *([f"interrupted after step {interrupt}"] if interrupt is not None else []),
            "compiled anew" if fresh else "compiled before",
            *(["DeepCache"] if cached else []),
            *(["ControlNet"] if controlled else []),
            f"{sampling}",
        ]
    )
    patches = tuple(every[name] for name in chosen)
    return Prompt(words, patches, held, sampling, interrupt, asked, fresh, cached, controlled)
