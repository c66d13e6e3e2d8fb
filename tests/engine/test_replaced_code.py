"""Code that another node replaces while a model is compiled: on classes, in modules, in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, left_behind, relative
from .subject import Subject, reasons

PACK = f"({__name__.partition('.')[0]})"
"""What stands for a pack's name here."""
NORM = f"another node {PACK} replaces GroupNorm.forward"


@pytest.fixture(scope="module")
def xl(lab: Lab, host: Host) -> Subject:
    return Subject(lab, host, "narrowxl")


def _joint_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """A norm over all images of a batch together, as video packs have it for their frames."""
    joined = input.movedim(0, 1).flatten(1, 2).unsqueeze(0)
    plain = torch.nn.functional.group_norm(joined, self.num_groups, None, None, self.eps)
    images = plain.squeeze(0).unflatten(1, (input.shape[0], -1)).movedim(1, 0)
    shape = (1, -1, *[1] * (input.dim() - 2))
    return images * self.weight.view(shape) + self.bias.view(shape)


@contextlib.contextmanager
def joint_norms() -> Iterator[None]:
    """The joint norm on torch's class and the host's, for as long as this lasts."""
    import comfy.ops

    theirs = comfy.ops.disable_weight_init.GroupNorm
    before = torch.nn.GroupNorm.forward, theirs.forward_comfy_cast_weights
    torch.nn.GroupNorm.forward = _joint_norm
    theirs.forward_comfy_cast_weights = _joint_norm
    try:
        yield
    finally:
        torch.nn.GroupNorm.forward, theirs.forward_comfy_cast_weights = before


def around_the_model(scope: Callable[[], Any], *, outermost: bool) -> Callable[[Any], Any]:
    """The patch that enters `scope` around each call of the UNet, outside or inside of ours."""
    from comfy.patcher_extension import WrappersMP

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with scope():
            return executor(*args, **kwargs)

    def patch(model: Any) -> Any:
        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "tests.pack", wrapper)
        others = clone.wrappers[WrappersMP.DIFFUSION_MODEL]
        ours = others.pop("tests.pack")
        put = {"tests.pack": ours, **others} if outermost else {**others, "tests.pack": ours}
        clone.wrappers[WrappersMP.DIFFUSION_MODEL] = put
        return clone

    return patch


@pytest.mark.parametrize("outermost", [True, False])
def test_a_norm_replaced_on_its_class_while_sampling_runs_and_is_named(
    xl: Subject, outermost: bool
) -> None:
    patch = around_the_model(joint_norms, outermost=outermost)
    jobs = xl.lab.jobs()
    eager = xl.sample(patch(xl.model), batch=2)
    assert relative(eager, xl.sample(xl.model, batch=2)) > 1e-2, "the pack does nothing"
    for ours in (patch(xl.compiled), xl.lab.compiled(patch(xl.model))):
        calls = xl.report(ours)["calls"]["compiled"]
        assert relative(xl.sample(ours, batch=2), eager) < TOLERANCE
        assert reasons(xl.report(ours)).get(NORM, 0) >= 10
        assert left_behind(xl.unet) == []
        if outermost:  # blocks without such a norm stay compiled
            assert xl.report(ours)["calls"]["compiled"] > calls
    plain = xl.sample(xl.model, batch=2)
    assert relative(xl.sample(xl.compiled, batch=2), plain) < TOLERANCE
    assert reasons(xl.report(xl.compiled)) == {}  # for as long as it lasts
    assert xl.lab.jobs() == jobs


def test_a_function_of_torch_replaced_in_its_module_runs_and_is_named(xl: Subject) -> None:
    functional = torch.nn.functional
    own = functional.group_norm

    def half(*args: Any, **kwargs: Any) -> torch.Tensor:
        return own(*args, **kwargs) * 0.5

    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        functional.group_norm = half
        try:
            yield
        finally:
            functional.group_norm = own

    patch = around_the_model(replaced, outermost=True)
    eager = xl.sample(patch(xl.model))
    ours = patch(xl.compiled)
    assert relative(xl.sample(ours), eager) < TOLERANCE
    assert reasons(xl.report(ours))[f"another node {PACK} replaces functional.group_norm"] >= 10


# --- classes swapped in place --------------------------------------------------------------------


@pytest.fixture
def swapped(xl: Subject) -> Callable[..., Any]:
    """`swapped(model, names)`: a clone whose patches put a pack's classes in place of the host's.

    The residual blocks of the pack take one more argument, which its UNet gives them.
    """
    from comfy.ldm.modules.attention import BasicTransformerBlock, CrossAttention
    from comfy.ldm.modules.diffusionmodules import openaimodel

    class PackBlock(openaimodel.ResBlock):
        def forward(self, x: Any, emb: Any, style: Any = None) -> Any:
            return super().forward(x, emb) * (1.0 if style is None else style)

    class PackAttention(CrossAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 1.5

    class PackTransformer(BasicTransformerBlock):
        def forward(self, x: Any, context: Any = None, transformer_options: Any = None) -> Any:
            return super().forward(x, context, transformer_options or {}) * 0.9

    class PackUNet(openaimodel.UNetModel):
        def _forward(self, *args: Any, **kwargs: Any) -> Any:
            blocks = [m for m in self.modules() if type(m) is PackBlock]
            before = [m.__dict__.get("forward") for m in blocks]
            for block in blocks:  # as its own call of each block, with one argument more
                bound = block.forward
                block.__dict__["forward"] = lambda x, emb, bound=bound: bound(x, emb, 0.8)
            try:
                return super()._forward(*args, **kwargs)
            finally:
                for block, was in zip(blocks, before, strict=True):
                    block.__dict__.pop("forward", None)
                    if was is not None:
                        block.__dict__["forward"] = was

    made = {
        openaimodel.ResBlock: PackBlock,
        CrossAttention: PackAttention,
        BasicTransformerBlock: PackTransformer,
        openaimodel.UNetModel: PackUNet,
    }

    xl.sample(xl.model, steps=1)  # no other clone's classes are in place now
    classes = {name: type(module) for name, module in xl.unet.named_modules()}

    def swap(model: Any, *kinds: str) -> Any:
        clone = model.clone()
        for name, cls in classes.items():
            if cls in made and (not kinds or cls.__name__ in kinds):
                path = f"diffusion_model.{name}" if name else "diffusion_model"
                clone.add_object_patch(f"{path}.__class__", made[cls])
        return clone

    return swap


@pytest.mark.parametrize(
    "kinds",
    [
        (),
        ("UNetModel", "ResBlock"),
        ("ResBlock",),
        ("CrossAttention",),
        ("BasicTransformerBlock",),
        ("UNetModel",),
    ],
    ids=lambda kinds: "+".join(kinds) or "all",
)
def test_classes_swapped_in_place_are_left_to_their_owner(
    xl: Subject, swapped: Callable[..., Any], kinds: tuple[str, ...]
) -> None:
    jobs = xl.lab.jobs()
    eager = xl.sample(swapped(xl.model, *kinds))
    for ours in (swapped(xl.compiled, *kinds), xl.lab.compiled(swapped(xl.model, *kinds))):
        assert torch.equal(xl.sample(ours), eager) or (relative(xl.sample(ours), eager) < TOLERANCE)
        told = xl.report(ours)
        said = [*reasons(told), *told["notes"]]
        assert any("Pack" in line and PACK in line for line in said), said
        assert left_behind(xl.unet) == []
    plain = xl.sample(xl.model)
    assert relative(xl.sample(xl.compiled), plain) < TOLERANCE
    assert reasons(xl.report(xl.compiled)) == {}
    assert xl.lab.jobs() == jobs
