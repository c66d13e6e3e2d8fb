"""Models that read values of tensors that they made themselves, that are made with weights from a
file, and whose blocks cut one argument by another: learned, and computed as the model does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmgraph_backends.errors import LearnError
from warmgraph_backends.host_api.layers import bound_forward
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from . import learned_models
from .learned import CALLS, Regions, arguments, error, learned_of, outside

SOURCE = """


class OwnValues(Model):
    def __init__(self):
        super().__init__()
        self.factor = torch.tensor([2, 3]).prod().item() / 6

    def run(self, h, vec, options):
        owners = torch.zeros((h.shape[0],), dtype=torch.long)
        most = torch.bincount(owners, minlength=h.shape[0]).max().item()
        h = torch.cat((self.factor * vec.unsqueeze(1).repeat(1, most, 1), h), 1)
        return super().run(h, vec, options)[:, most:]


class Overwritten(Model):
    def run(self, h, vec, options):
        known = torch.zeros(2)
        known[1:] = vec.max()
        return super().run(h, vec, options) * (2 if known.max().item() > 0 else 1)


class Loading(Model):
    def __init__(self, weights=None):
        super().__init__()
        self.beside = torch.nn.Linear(2, 2)
        self.beside.load_state_dict(weights if weights is not None else {})


class CutBlock(Block):
    def forward(self, x, vec, turns, transformer_options={}):
        return x + self.mix(x, vec, transformer_options) * turns[-x.shape[1]:, :].cos()


class Cut(Model):
    block = CutBlock

    def run(self, h, vec, options):
        turns = torch.arange(h.shape[1]).unsqueeze(1) * torch.ones(64)
        for block in self.blocks:
            h = block(h, vec, turns, transformer_options=options)
        return h


class Sound(Model):
    def forward(self, x, timestep, context, sound, transformer_options={}):
        x = x.flatten(2) + 0.1 * sound
        return super().forward(x, timestep, context, transformer_options)
"""
#: Of sound: the one that is watched is as long as a text's tokens are wide.
SOUNDS = ((1, 1, 64, 5), (2, 1, 17, 9), (1, 1, 300, 1))


@pytest.fixture(scope="module")
def models(host: Host) -> Iterator[Any]:
    yield learned_models.load(learned_models.SOURCE + SOURCE)
    learned_models.unload()


def check(model: torch.nn.Module, record: Any, calls: Any) -> None:
    """All of a model's blocks are served by a worker's export, and the result is the model's."""
    assert outside(record) == set() and len(record["blocks"]) == 2
    regions = Regions(model, record, exported=True)
    for given in calls:
        with torch.no_grad():
            reference = model(*given)
            result = regions.run(lambda given=given: model(*given))
        assert regions.declined == [] and regions.served == 2
        assert error(result, reference) < 1e-5


@pytest.mark.parametrize("name", ["OwnValues", "Cut"])
def test_values_and_sizes_that_follow_from_the_code_are_known(models: Any, name: str) -> None:
    make = getattr(models, name)
    record = learned_of(make, *arguments(*CALLS[0]))
    check(make().eval(), record, [arguments(*sizes) for sizes in CALLS])


def test_values_into_which_something_unknown_was_written_are_not_known(models: Any) -> None:
    with pytest.raises(LearnError) as raised:
        learned_of(models.Overwritten, *arguments(*CALLS[0]))
    assert raised.value.reason.key == "learned_reads_data"


def test_a_model_that_is_made_with_weights_of_its_file_is_learned_without(models: Any) -> None:
    weights = torch.nn.Linear(2, 2).state_dict()
    model = models.Loading(weights).eval()
    is_first = iter((True,))  # of the real one alone; the others are made without data

    def make() -> Any:
        return models.Loading(weights if next(is_first, False) else None)

    record = learned_of(make, *arguments(*CALLS[0]))
    check(model, record, [arguments(*sizes) for sizes in CALLS])


def test_a_length_that_a_width_happens_to_equal_is_learned_as_a_length(models: Any) -> None:
    def given(sizes: Any) -> tuple[torch.Tensor, ...]:
        latent, timestep, text = arguments(*sizes)
        return latent.flatten(2), timestep, text, torch.ones_like(latent.flatten(2))

    record = learned_of(models.Sound, *given(SOUNDS[0]))
    check(models.Sound().eval(), record, map(given, SOUNDS))


@pytest.mark.parametrize(("kind", "wraps"), [("stable_audio", False), ("aura", True)])
def test_a_method_around_which_the_host_puts_nothing_is_not_taken_for_one(
    host: Host, kind: str, wraps: bool
) -> None:
    """Stable Audio's forward calls its `_forward` by itself: no wrapper would come to it."""
    root = transformers.make(kind).diffusion_model
    assert (bound_forward(root) is not None) == wraps
