"""The doctor's small graph on a card: built here, run and replayed in another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmgraph_console import asked

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def test_a_small_graph_is_replayed_in_a_process_that_did_not_build_it(tmp_path: Path) -> None:
    graph = tmp_path / "graph"
    facts, died = asked.ask("torch", "cuda", str(graph), limit_s=600.0)
    assert died is None and facts["built"][0] == ""
    facts, died = asked.ask("graph", "cuda", str(graph), limit_s=300.0)
    assert died is None and facts["replayed"][0] == ""
