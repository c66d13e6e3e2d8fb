"""Models drawn at random of which something changes between two steps, or whose root keeps
something: no image is another one than the host's own code gives.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from . import learned_models
from .lab import Lab
from .learned import error
from .learned_generator import CHANGES, changing
from .learned_steps import Steps, exported_here
from .test_learned_models import narrow

#: The first is watched.
SIZES = ((1, 4, 6, 5), (1, 4, 6, 5), (1, 4, 6, 5))
#: Of five changes, three of them of roots.
QUICK, CHUNK = range(18, 24), 100


def wrong(lab: Lab, folder: Path, seed: int, served: set[str]) -> str | None:
    """Say what is wrong with a drawn model, or None.

    Args:
        served: gets the names of changes before which blocks were compiled.
    """
    drawn = changing(seed)
    module = learned_models.load(drawn.text)
    options = dict[str, Any](step=1, word="a", gain=1.0)
    with torch.inference_mode():
        made = Steps(lab, folder, module.Model, exported_here)
        alone = deepcopy(made.root)
        for turn in range(6):
            if turn == 3:
                if made.scope.compiled_calls:
                    served.add(drawn.drawn["change"])
                for root in (made.root, alone):
                    scope = {"module": module, "options": options, "torch": torch}
                    exec(drawn.change, {**scope, "block": root.blocks[1]})  # noqa: S102
            given = narrow(SIZES[turn % 3])
            reference = alone(*given, transformer_options=dict(options))
            result = made.make_with(given, **options)
            if error(result, reference) >= 1e-5:
                return f"{seed}: off by {error(result, reference):.1e} in {turn}: {drawn.drawn}"
    return None


def test_what_changes_in_drawn_models_makes_nothing_wrong(
    own_lab: Lab, host: Host, tmp_path: Path
) -> None:
    """Every kind is drawn in all; and those of roots that keep something are compiled."""
    served = set[str]()
    found = [wrong(own_lab, tmp_path / f"{n}", n, served) for n in QUICK]
    learned_models.unload()
    assert [each for each in found if each is not None] == []
    drawn = {changing(n).drawn["change"] for n in range(CHUNK)}
    assert drawn == set(CHANGES) and any(each.startswith("root") for each in served), served


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(20))
def test_what_changes_in_two_thousand_makes_nothing_wrong(
    own_lab: Lab, host: Host, tmp_path: Path, chunk: int
) -> None:
    first = CHUNK * chunk
    found = [wrong(own_lab, tmp_path / f"{n}", n, set()) for n in range(first, first + CHUNK)]
    learned_models.unload()
    assert [each for each in found if each is not None] == []
