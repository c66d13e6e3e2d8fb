"""DeepCache on a model whose modules other nodes replace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from .cached import CALLS, Pair, Reference, cached, changed, evaluations

#: DeepCache's other tests show what is compiled; these take minutes.
pytestmark = pytest.mark.slow


class Scaled(torch.nn.Module):
    """A layer that others hang behind a block's own, as motion modules are."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


@pytest.mark.parametrize("branch", [0, 1, 3])
def test_layers_injected_for_the_run(xl: Pair, branch: int) -> None:
    from comfy.patcher_extension import PatcherInjection

    def blocks(patcher: Any) -> list[Any]:
        unet = patcher.model.diffusion_model
        return [*unet.input_blocks[1:], *unet.output_blocks]

    def inject(patcher: Any) -> None:
        for number, block in enumerate(blocks(patcher)):
            block.append(Scaled(1.0 + 0.01 * number))

    def eject(patcher: Any) -> None:
        for block in blocks(patcher):
            if isinstance(block[-1], Scaled):
                block.pop(len(block) - 1)

    patch = changed(lambda model: model.set_injections("tests", [PatcherInjection(inject, eject)]))
    before = list(xl.unet.named_modules())
    try:
        assert xl.check(patch, branch=branch) == CALLS
    finally:
        xl.host.unload()
    assert list(xl.unet.named_modules()) == before


def _weaker(module: Any) -> Any:
    twin = copy.deepcopy(module)
    for parameter in twin.parameters():
        parameter.mul_(0.8)
    return twin


_TRANSFORMER = "output_blocks.2.1.transformer_blocks.0.attn2"


OBJECTS = [
    # Within blocks that the two networks share with the model.
    *((0, "middle_block.0"), (0, _TRANSFORMER), (5, "output_blocks.4.0"), (5, _TRANSFORMER)),
    # What they hold themselves; the layers of the block before the cut are such, too.
    *((5, name) for name in ("middle_block.0", "middle_block", "output_blocks.5")),
    *((0, name) for name in ("input_blocks.0", "middle_block", "output_blocks.4", "label_emb")),
    *(
        pytest.param(0, name, marks=pytest.mark.slow)
        for name in ("output_blocks.2", "output_blocks.4.0", "output_blocks.5", "time_embed", "out")
    ),
]


@pytest.mark.parametrize(("branch", "name"), OBJECTS)
def test_replaced_objects(xl: Pair, name: str, branch: int) -> None:
    """They are in the model from its loading on, which comes after all nodes, until another clone
    is loaded.
    """
    place = f"diffusion_model.{name}"
    twin = _weaker(xl.model.get_model_object(place))
    patch = changed(lambda model: model.add_object_patch(place, twin))
    reference = Reference(branch=branch)
    try:
        ours = [cached(patch(xl.model), branch=branch), patch(cached(xl.model, branch=branch))]
        expected = xl.sample(patch(reference.attach(xl.model)))
        ours += [cached(patch(xl.model), branch=branch)]  # it is in the model now
        plain = xl.sample(Reference(branch=branch).attach(xl.model))
        assert not torch.equal(expected, plain)
        ours_without = cached(xl.model, branch=branch)
        for model in ours:
            assert torch.equal(xl.sample(model), expected)
            assert evaluations(model) == CALLS
            assert torch.equal(xl.sample(ours_without), plain)
    finally:
        xl.host.unload()


@pytest.mark.parametrize("name", ["forward", "_forward"])
def test_a_replaced_forward_of_the_unet_runs(xl: Pair, name: str) -> None:
    """What it computes nobody knows: it runs at every step."""
    host = getattr(xl.unet, name)

    def scaled(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = host(x * 1.05, *args, **kwargs)
        return result

    patch = changed(lambda model: model.add_object_patch(f"diffusion_model.{name}", scaled))
    ours = cached(patch(xl.model))
    try:
        found = xl.sample(ours)
        expected = xl.sample(patch(xl.model))
        assert not torch.equal(expected, xl.sample(xl.model))
        if name == "_forward":
            assert torch.equal(found, expected)
        else:  # it calls the host's own, within which the calls are DeepCache's
            assert torch.equal(found, xl.sample(patch(Reference().attach(xl.model))))
        # The host puts the method back as an attribute of the instance.
        found, expected = (xl.sample(m) for m in (cached(xl.model), Reference().attach(xl.model)))
        assert torch.equal(found, expected)
    finally:
        xl.host.unload()
        xl.unet.__dict__.pop(name, None)
