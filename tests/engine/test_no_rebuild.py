"""After one build, nothing that a user changes builds again, and every UNet call equals eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .lab import Lab, relative
from .probed import Probed
from .rows import some_rows

VISIBLE = 0.01
"""What a LoRA must move of the image, or the test is blind: a hundred times the tolerance."""

SIZES = {
    "square": (64, 64),
    "odd rows": (45, 60),
    "both odd": (25, 33),
    "tall strip": (96, 8),
    "wide strip": (5, 120),
    "primes": (31, 47),
    "smallest": (1, 1),
    "720x960": (90, 120),
}


def _prompt(host: Host, clip: Any, tokens: int) -> Any:
    """A prompt of so many tokens: 75 words a chunk of 77."""
    conditioning = host.encode(clip, " ".join(["cat"] * (75 * tokens // 77 - 10)))
    assert conditioning[0][0].shape[1] == tokens
    return conditioning


def test_a_first_prompt_at_cfg_1_builds_what_cfg_7_needs(probed: Probed) -> None:
    probed.check(size=(64, 64), cfg=1.0)
    assert probed.probe.calls[0].shape[0] == 1
    probed.check(size=(64, 64), cfg=7.0)
    assert probed.probe.calls[0].shape[0] == 2


@pytest.mark.parametrize("batch", some_rows([1, 2, 3, 4], [1, 3]))
def test_any_batch(probed: Probed, batch: int) -> None:
    probed.check(size=(24, 32), batch=batch, steps=2)
    assert {call.shape[0] for call in probed.probe.calls} == {2 * batch}
    probed.check(size=(24, 32), batch=batch, cfg=1.0)
    assert {call.shape[0] for call in probed.probe.calls} == {batch}


@pytest.mark.parametrize("name", some_rows(SIZES, ["odd rows", "tall strip", "primes", "smallest"]))
def test_any_size(probed: Probed, name: str) -> None:
    probed.check(size=SIZES[name])


LENGTHS = [(positive, negative) for positive in (77, 154, 231) for negative in (77, 154, 231)]


@pytest.mark.parametrize("lengths", some_rows(LENGTHS, [(77, 77), (154, 77), (77, 231)]), ids=str)
def test_prompts_of_any_length_equal_or_not(probed: Probed, lengths: tuple[int, int]) -> None:
    positive, negative = lengths
    prompts = {
        "positive": _prompt(probed.host, probed.clip, positive),
        "negative": _prompt(probed.host, probed.clip, negative),
    }
    probed.check(**prompts)
    assert probed.probe.calls[0].tokens >= max(positive, negative)


@pytest.mark.parametrize("after", [True, False], ids=["lora on compiled", "compile on lora"])
@pytest.mark.parametrize("kind", ["lora", "locon"])
def test_loras_on_changed_swapped_and_off(probed: Probed, kind: str, after: bool) -> None:
    host, lab = probed.host, probed.lab
    other = "locon" if kind == "lora" else "lora"
    bare = probed.probe.attach(probed.plain)

    def compiled(name: str, strength: float) -> Any:
        (patched,) = host.node(
            "LoraLoaderModelOnly",
            model=probed.model if after else bare,
            lora_name=host.model_file(name, base="narrowxl"),
            strength_model=strength,
        )
        return patched if after else lab.compiled(patched)

    plain = probed.check(size=(16, 24))
    images = [
        probed.check(compiled(name, strength), size=(16, 24))
        for name, strength in [(kind, 1.0), (kind, 0.4), (other, 1.0)]
    ]
    for n, image in enumerate(images):
        assert relative(image, plain) > VISIBLE
        assert all(relative(image, earlier) > VISIBLE / 2 for earlier in images[:n])
    assert torch.equal(probed.check(size=(16, 24)), plain)


def test_another_checkpoint_with_other_weights(probed: Probed, lab: Lab, host: Host) -> None:
    builds = lab.builds()
    other = Probed(lab, host, seed=1)
    assert lab.builds() == builds
    assert {k["key"] for k in other.report()["kinds"]} == {
        k["key"] for k in probed.report()["kinds"]
    }
    image = other.check(size=(25, 33), batch=2)
    mine = probed.check(size=(25, 33), batch=2)
    assert relative(image, mine) > VISIBLE
    assert torch.equal(other.check(size=(25, 33), batch=2), image)
