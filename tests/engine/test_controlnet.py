"""Compile ControlNet: a control network's own results, and the images under it, stay the host's."""

from __future__ import annotations

import pytest

from warmgraph_tools.inprocess import Host

from .controlled import Controlled
from .lab import Lab

HUNG = {"get_control", "copy_to", "pre_run", "cleanup", "__reduce_ex__"}


@pytest.fixture(scope="module")
def xl(lab: Lab, host: Host) -> Controlled:
    return Controlled(lab, host)


def test_behind_its_unet_a_control_network_has_one_graph_of_its_own(
    lab: Lab, xl: Controlled
) -> None:
    unet = lab.engine.report(lab.compiled(xl.model))
    kinds = {kind["key"]: kind["kind"] for kind in xl.report()["kinds"]}
    own = [label for key, label in kinds.items() if key not in {k["key"] for k in unet["kinds"]}]
    assert own == ["Hint block 3->64"] and len(kinds) > 5
    assert xl.report()["regions"]["eager"] == 0 and xl.report()["model"] == "ControlNet"
    xl.check()
