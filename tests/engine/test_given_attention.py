"""Blocks that are given an attention in some calls, as newer ComfyUIs' sparse attention gives it,
are compiled around it.
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

#: Calls of blocks in a run: two blocks, three sizes of four steps each.
EVERY = 2 * 3 * 4
#: Of the two larger sizes.
LARGER = 2 * 2 * 4
GIVEN = "called with another node's attention, which a compiled graph calls from the next run on"


@pytest.fixture(scope="module")
def tree(host_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return newer_tree.make_or_skip(host_tree, tmp_path_factory.mktemp("giving"))


def seen_of(tree: Path, host: Host, folder: Path, *names: str) -> dict[str, Any]:
    with keeping(folder / "given"):
        return seen_by("given_child.py", tree, host.base, folder / "given", *names, timeout=1200)


@pytest.fixture(
    scope="module", params=["plain", pytest.param("int8_convrot", marks=pytest.mark.slow)]
)
def form(request: Any) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def seen(
    tree: Path, host: Host, tmp_path_factory: pytest.TempPathFactory, form: str
) -> dict[str, Any]:
    return seen_of(tree, host, tmp_path_factory.mktemp(form), form)


def _error(run: dict[str, Any]) -> float:
    return max(error for image in run["errors"] for error in image)


def test_a_given_attention_makes_the_images_that_it_makes_without_us(
    seen: dict[str, Any], form: str
) -> None:
    for name, run in seen.items():
        assert _error(run) <= (TOLERANCE if form == "plain" else 4 * QUANTISED), name
    norms = {name: run["norms"] for name, run in seen.items()}
    assert norms["back"] == norms["dense"] and norms["again"] == norms["third"]
    assert norms["second"] == norms["third"] not in (norms["dense"], norms["all"])


def test_a_given_attention_is_called_as_often_and_in_the_order_as_without_us(
    seen: dict[str, Any],
) -> None:
    """Also where graphs are compared: it keeps what it saw, and a second call would change that."""
    for name, run in seen.items():
        eager, ours = run["calls"]
        assert eager == ours, name
        told = {"dense": 0, "back": 0, "all": EVERY}
        assert len(ours) == told.get(name, len(ours)), name
        assert name in told or 0 < len(ours) < LARGER, name


def test_blocks_are_compiled_around_a_given_attention_from_the_second_run_on(
    seen: dict[str, Any],
) -> None:
    """Of the first one's images, the last may be made with the graph already."""
    first = seen["first"]
    assert EVERY - len(first["calls"][1]) <= first["compiled"] < EVERY
    assert first["reasons"] in ([], [GIVEN])
    for name, run in seen.items():
        if name != "first":
            assert run["compiled"] == EVERY and run["reasons"] == [], name
            assert run["jobs"] == 0, name


@pytest.fixture(scope="module")
def more(tree: Path, host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return seen_of(tree, host, tmp_path_factory.mktemp("more"), "plain", "more")


@pytest.mark.slow
def test_a_given_attention_goes_along_with_other_changes_of_a_block(more: dict[str, Any]) -> None:
    """With another part's code of a node, and with graphs that count elements by 64 bits."""
    for name, run in more.items():
        assert _error(run) <= TOLERANCE, name
        eager, ours = run["calls"]
        assert eager == ours and run["others"][0] == run["others"][1], name
    for name in ("beside again", "large", "large again", "after"):
        assert more[name]["compiled"] == EVERY and more[name]["reasons"] == [], name
    assert more["beside again"]["others"] == [EVERY, EVERY]
    assert more["large noted"]["compiled"] < EVERY
    assert more["beside again"]["jobs"] == more["large again"]["jobs"] == more["after"]["jobs"] == 0


@pytest.mark.slow
def test_what_a_given_attention_raises_ends_the_prompt_as_without_us(more: dict[str, Any]) -> None:
    failed = more["fails"]
    assert failed["errors"].count([]) == 1 and failed["reasons"] == []
    assert len(failed["calls"][0]) == 6
