"""On an imitated newer ComfyUI (`newer_tree`) no prompt fails, every image is the host's, and each
part is compiled or named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from warmgraph_tools.inprocess import Host
from warmgraph_tools.kept_graphs import keeping

from . import newer_tree
from .lab import TOLERANCE
from .processes import seen_by
from .quantised_runs import QUANTISED
from .transformer_runs import EXPECTED

#: Whose attention gets an argument that nobody knows.
UNHEARD_OF = "krea"
UNET = "unet"
QUANTISED_WAN = "wan:int8"
#: Of a decoder in eight bits, as `test_h3_vae` bounds it.
INT8 = 1e-2
QUICK = (QUANTISED_WAN, UNHEARD_OF, UNET)
#: Of every other family of transformers one, and what differs from it in its blocks.
ALL = (
    "wan",
    *("zimage", "zimage:int8_convrot", "wan:fp8_e4m3fn", "wan_image", "flux1", "flux1:int8"),
    *("flux2", "chroma", "lumina2", "qwen", "sd3", "hunyuan", "anima", "predict2_video"),
)
OWN = "a layer of it has an attention of its own"
STEPS = ("came so", "plain", "own", "back")


@pytest.fixture(scope="module")
def tree(host_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return newer_tree.make_or_skip(host_tree, tmp_path_factory.mktemp("newer"))


def seen_of(tree: Path, host: Host, folder: Path, *names: str) -> dict[str, Any]:
    """What a process of that host saw of these models."""
    with keeping(folder / "newer"):
        return seen_by("newer_child.py", tree, host.base, folder / "newer", *names, timeout=3000)


@pytest.fixture(scope="module")
def quick(tree: Path, host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return seen_of(tree, host, tmp_path_factory.mktemp("quick"), *QUICK)


def test_a_quantised_block_whose_layers_have_attentions_of_their_own_is_compiled(
    quick: dict[str, Any],
) -> None:
    is_served(quick[QUANTISED_WAN], QUANTISED_WAN)


def is_served(seen: dict[str, Any], name: str) -> None:
    """All compiled in each step, whatever attention the layers named, and nothing built for it."""
    kind, _, form = name.partition(":")
    for step in (seen[step] for step in STEPS):
        assert step["error"] <= (3 * QUANTISED if form else TOLERANCE)
        places = EXPECTED[kind].places - EXPECTED[kind].others
        assert step["regions"] == {"total": places, "compiled": places, "eager": 0}, step["reasons"]
        assert step["jobs"] == 0
    for own in (seen["own"], seen["came so"]) if seen["layers"] else ():
        assert own["norm"] != seen["plain"]["norm"]
    if seen["layers"]:
        # Once by ours and once by eager's call, which the probe holds beside it; by the host's
        # blocks, too, while graphs are compared with them.
        assert seen["own"]["attentions"] == 2 * EXPECTED[kind].attentions
        assert seen["came so"]["attentions"] > seen["own"]["attentions"]
    assert seen["plain"]["attentions"] == seen["back"]["attentions"] == 0
    assert seen["back"]["norm"] == seen["plain"]["norm"]


def test_an_argument_of_attention_that_is_not_known_leaves_its_blocks_to_the_host_by_name(
    quick: dict[str, Any],
) -> None:
    seen = quick[UNHEARD_OF]
    for step in (seen[step] for step in STEPS):
        assert step["error"] == 0 or step["error"] <= TOLERANCE
        said = "attention is called with attention_span, which compiled code does not pass on"
        assert any(reason.endswith(said) for reason in step["reasons"])
        assert step["regions"]["compiled"] == 0
        assert step["jobs"] == 0
    assert seen["own"]["attentions"] > 0


def test_a_unets_blocks_stay_compiled_around_attentions_of_their_own(quick: dict[str, Any]) -> None:
    seen = quick[UNET]
    assert seen["layers"] > 0
    for step in (seen[step] for step in STEPS):
        assert step["error"] <= TOLERANCE and step["jobs"] == 0
        assert step["regions"]["compiled"] == seen["layers"] // 2 > 0, step["reasons"]
        assert OWN not in step["reasons"]
    assert seen["own"]["attentions"] == 2 * seen["layers"]
    assert seen["came so"]["attentions"] >= 2 * seen["layers"]
    assert seen["plain"]["attentions"] == seen["back"]["attentions"] == 0
    assert seen["back"]["norm"] == seen["plain"]["norm"] != seen["own"]["norm"]


@pytest.mark.parametrize("name", QUICK)
def test_no_step_with_an_attention_of_a_layers_own_is_captured(
    quick: dict[str, Any], name: str
) -> None:
    whole = {step: quick[name][step]["whole"] for step in STEPS}
    assert whole == {"came so": OWN, "plain": None, "own": OWN, "back": None}


@pytest.mark.parametrize("name", QUICK)
def test_nothing_of_ours_runs_while_the_host_records_its_allocations(
    quick: dict[str, Any], name: str
) -> None:
    assert quick[name]["recorded"]["within"] == 0 < quick[name]["recorded"]["paused"]


@pytest.mark.parametrize(("form", "bound"), [("plain", TOLERANCE), ("int8_convrot", INT8)])
def test_a_vae_that_folds_norms_and_residuals_into_its_products_is_compiled(
    tree: Path, host: Host, tmp_path_factory: pytest.TempPathFactory, form: str, bound: float
) -> None:
    folder = tmp_path_factory.mktemp("vae")
    with keeping(folder / "newer"):
        seen = seen_by("newer_vae_child.py", tree, host.base, folder / "newer", form, timeout=1200)[
            form
        ]
    assert seen["regions"] == {"total": 2, "compiled": 2, "eager": 0}, seen["reasons"]
    assert seen["jobs"] == 0
    assert max(seen["errors"]) <= bound, seen
    is_few = form != "plain"  # the host attends in fewer bits then, and so do graphs
    assert (seen["exact"] > 3 * bound) == is_few


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_family_is_compiled(
    tree: Path, host: Host, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    seen = seen_of(tree, host, tmp_path_factory.mktemp("each"), name)[name]
    is_served(seen, name)
    assert seen["recorded"]["within"] == 0 < seen["recorded"]["paused"]
