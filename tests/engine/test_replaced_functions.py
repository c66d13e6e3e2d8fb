"""Packs that replace the host's functions when they are imported: their code is compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .subject import Subject, reasons

Install = Callable[[str, dict[str, str]], Path]
KIND = "Transformer block 64"

#: A pack's root module: imported by the server only, which it notes beside itself.
INIT = """
import os
from pathlib import Path
from .parts import sharing
with (Path(__file__).parent / "imports.txt").open("a") as file:
    file.write(f"{os.getpid()}\\n")
NODE_CLASS_MAPPINGS = {}
READY = True
"""
SHARING = """
import functools
from comfy.ldm.modules import attention

class Unit:
    options = None

    @classmethod
    def take_over(cls, function):
        @functools.wraps(function)
        def forward(self, x, context=None, transformer_options={}):
            cls.options = transformer_options
            return function(self, x, context, transformer_options) * FACTOR
        attention.BasicTransformerBlock.forward = forward

Unit.take_over(attention.BasicTransformerBlock.forward)
"""


def files(factor: str, sharing: str = SHARING) -> dict[str, str]:
    return {"__init__.py": INIT, "parts/sharing.py": sharing.replace("FACTOR", factor)}


@pytest.fixture
def xl(lab: Lab, host: Host) -> Subject:
    return Subject(lab, host, "narrowxl")


def importers(folder: Path) -> set[int]:
    return {int(line) for line in (folder / "imports.txt").read_text().split()}


def test_forwards_that_two_packs_wrapped_are_compiled_once_and_loaded_from_then_on(
    xl: Subject, install_pack: Install, make_lab: Callable[..., Lab]
) -> None:
    plain = xl.sample(xl.model)
    half = install_pack("Half sharing", files("0.5"))
    more = install_pack("More sharing", files("1.5"))
    eager = xl.sample(xl.model)
    assert relative(eager, plain) > 1e-3

    builds = xl.lab.builds()
    compiled = xl.lab.compiled(xl.model)
    assert xl.lab.counts(compiled)[2] == 0, xl.report(compiled)["eager"]
    assert xl.lab.builds() - builds <= 1  # none where the lab's graphs are kept
    assert relative(xl.sample(compiled), eager) < TOLERANCE
    assert importers(half) == importers(more) == {os.getpid()}

    again = xl.lab.compiled(xl.host.load("narrowxl")[0])
    assert xl.lab.counts(again)[2] == 0 and xl.lab.builds() - builds <= 1
    other = make_lab()  # a new process, as far as graphs go
    loaded = other.compiled(xl.host.load("narrowxl")[0], when_missing="never")
    other.settle()
    assert relative(xl.sample(loaded), eager) < TOLERANCE
    assert other.counts(loaded) == (0, len(xl.report(compiled)["kinds"]), 0)


def test_what_a_wrapped_forward_keeps_of_a_step_is_kept_when_a_graph_runs_in_its_place(
    xl: Subject, install_pack: Install
) -> None:
    import sys

    install_pack("Half sharing", files("0.5"))
    install_pack("More sharing", files("1.5"))
    [unit] = [m.Unit for n, m in sys.modules.items() if n.endswith("Half sharing.parts.sharing")]
    compiled = xl.lab.compiled(xl.model)
    xl.sample(compiled, steps=1)
    kept = unit.options
    unit.options = None
    xl.sample(compiled, steps=1)
    assert xl.report(compiled)["regions"]["eager"] == 0
    assert unit.options is not None and unit.options.keys() == kept.keys()


def test_after_the_packs_the_hosts_own_graphs_serve_again(xl: Subject) -> None:
    builds = xl.lab.builds()
    assert reasons(xl.check()) == {}
    assert xl.lab.builds() == builds


def test_a_pack_whose_file_needs_the_rest_of_it_is_named_and_only_its_blocks_run_eager(
    xl: Subject, install_pack: Install
) -> None:
    install_pack("Needy sharing", files("0.5", "from .. import os as host_os\n" + SHARING))
    eager = xl.sample(xl.model)
    compiled = xl.lab.compiled(xl.model)
    report = xl.report(compiled)
    [reason] = reasons(report)
    assert reasons(report) == {reason: xl.blocks}
    assert reason.startswith(
        "compiling failed: Needy sharing replaces BasicTransformerBlock.forward, and its code "
        "cannot be built apart from it: ImportError"
    )
    assert relative(xl.sample(compiled), eager) < TOLERANCE
    assert xl.report(compiled)["calls"]["compiled"] > 0


def test_a_replacement_that_hangs_on_the_steps_options_runs_eager_and_is_right(
    xl: Subject, install_pack: Install
) -> None:
    sharing = SHARING.replace("FACTOR", "transformer_options.get('another', 0.5)")
    install_pack("Looking in", files("", sharing))

    def patch(model: Any) -> Any:
        clone = model.clone()
        clone.model_options["transformer_options"]["another"] = 2.0
        return clone

    for change in (lambda model: model, patch):
        eager = xl.sample(change(xl.model))
        compiled = xl.lab.compiled(change(xl.model))
        assert relative(xl.sample(compiled), eager) < TOLERANCE
        [reason] = reasons(xl.report(compiled))
        assert "Looking in replaces" in reason and "the step's options" in reason


def test_a_pack_that_wraps_later_is_noticed_by_a_model_compiled_before(
    xl: Subject, install_pack: Install
) -> None:
    compiled = xl.compiled
    xl.sample(compiled)
    install_pack("Half sharing", files("0.5"))
    install_pack("More sharing", files("1.5"))
    assert relative(xl.sample(compiled), xl.sample(xl.model)) < TOLERANCE
    assert torch.equal(xl.sample(xl.model), xl.sample(xl.model))
