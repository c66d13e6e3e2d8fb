"""Three hundred prompts by chance over eight families in three dtypes: LoRAs in three ways, merges,
ControlNets, caches, cancels, errors, unloading; sizes, batches, lengths of text. None is another
one than ComfyUI's own on the same objects, none fails, and nothing is built after a model's first
prompt but for its first bypass LoRA.

Each prompt is a test, and is drawn from its name: a wrong one is made again by that alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from warmgraph_backends.kinds.tolerance import RELATIVE_L2
from warmgraph_tools.inprocess import Host

from .campaign import DTYPES, KINDS, Studio, draw, studios
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
    made, prompt = studio(kind, dtype), draw(kind, dtype, number)
    jobs = made.lab.jobs()
    found, expected = made.pair(prompt)
    if isinstance(expected, str):
        assert found == expected, prompt
    else:
        assert isinstance(found, torch.Tensor) and expected.isfinite().all(), (prompt, found)
        assert relative(found, expected) <= STEPS[prompt.dtype] * RELATIVE_L2[prompt.dtype], prompt
    if prompt.weights == "bypass LoRA" and made.may_build:
        made.may_build = False
    else:
        assert made.lab.jobs() == jobs, prompt
