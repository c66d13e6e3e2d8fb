"""Three hundred prompts by chance over eight families in three dtypes: LoRAs in three ways, merges,
ControlNets, caches, cancels, errors, unloading, packs that change the live model or the maths
around it; sizes, batches, lengths of text. None is another one than ComfyUI's own on the same
objects, none fails, after each pack all is compiled again, and nothing is built after a model's
first prompt but for the first bypass LoRA and the first attribute.

Each prompt is a test, and is drawn from its name: a wrong one is made again by that alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from warmgraph_backends.kinds.tolerance import RELATIVE_L2
from warmgraph_tools.inprocess import Host

from .campaign import AROUND, DTYPES, KINDS, Prompt, Studio, draw, studios
from .lab import Lab, relative

PROMPTS = 13
#: Of a whole image, which adds up what its calls differ by: three times what was seen at most, and
#: more in float32.
STEPS = {"float32": 1, "float16": 3, "bfloat16": 2}


@pytest.fixture(scope="module")
def studio(host: Host, shared: Lab) -> Iterator[Callable[[str, torch.dtype], Studio]]:
    with studios(host, shared) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("number", range(PROMPTS))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("kind", KINDS)
def test_no_prompt_is_wrong_fails_or_builds(
    studio: Callable[[str, torch.dtype], Studio], kind: str, dtype: torch.dtype, number: int
) -> None:
    check(studio(kind, dtype), draw(kind, dtype, number))


@pytest.mark.parametrize("around", AROUND)
def test_packs_around_a_prompt_change_no_later_one(
    studio: Callable[[str, torch.dtype], Studio], around: str | None
) -> None:
    prompt = draw("wan", torch.float32, 0)
    plain = {"weights": "own", "cache": None, "end": None, "unloaded": "never", "steps": 2}
    check(studio("wan", torch.float32), prompt._replace(**plain, around=around))


def check(made: Studio, prompt: Prompt) -> None:
    jobs = made.lab.jobs()
    found, expected = made.pair(prompt)
    if isinstance(expected, str):
        assert found == expected, prompt
    else:
        assert isinstance(found, torch.Tensor) and expected.isfinite().all(), (prompt, found)
        assert relative(found, expected) <= STEPS[prompt.dtype] * RELATIVE_L2[prompt.dtype], prompt
    if prompt.around is not None:
        check(made, prompt._replace(around=None, end=None))
        report = made.lab.engine.report(made.ours)
        assert report["regions"]["eager"] == 0, (prompt, report["eager"])
    what = prompt.around or prompt.weights
    if what in made.may_build:
        made.may_build.remove(what)
    else:
        assert made.lab.jobs() == jobs, prompt
