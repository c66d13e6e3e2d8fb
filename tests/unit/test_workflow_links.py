"""What waits to be filed: bounded, and gone once all of it has come or failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from warmgraph_backends.compilers.eager import Eager
from warmgraph_backends.contract import RegionSpec, WhenMissing
from warmgraph_backends.graphs.compiled_graph import CompiledGraph, State, Status
from warmgraph_backends.runtime.session import SessionOptions
from warmgraph_backends.sessions.workflow_links import MAX_RECORDS, WorkflowLinks, WorkflowRef
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store


class _Session:
    lesson = None

    def __init__(self, *graphs: CompiledGraph) -> None:
        self.options = SessionOptions(WhenMissing.BACKGROUND, "")
        self.all_graphs = list(graphs)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def _graph(key: str) -> CompiledGraph:
    graph = CompiledGraph(key, RegionSpec("unet", "residual", key, {}, (), ()), Eager())
    graph.status = Status(State.BUILDING)
    return graph


def _workflow_links(root: Path) -> Any:
    store = Store(root / "store", Signer(root), cap_bytes=lambda: 1 << 30, private=root)
    return WorkflowLinks(store, lambda user: root / "workflows")


def _workflow(number: int) -> WorkflowRef:
    return WorkflowRef(f"workflows/{number}.json", "default", f"id-{number}")


def test_what_has_failed_is_waited_for_no_longer(tmp_path: Path) -> None:
    links, one, other = _workflow_links(tmp_path), _graph("1" * 64), _graph("2" * 64)
    links.expect(_Session(one, other), _workflow(1))
    links.file()
    assert len(links._records) == 1
    one.status = Status(State.FAILED)
    links.file()
    (record,) = links._records.values()
    assert list(record.graphs) == [other.key]
    other.status = Status()  # compiling it was cancelled
    links.file()
    assert not links._records


def test_folders_that_wait_are_bounded_and_the_last_used_stay(tmp_path: Path) -> None:
    links, session = _workflow_links(tmp_path), _Session(_graph("1" * 64))
    for number in range(MAX_RECORDS):
        links.expect(session, _workflow(number))
    links.expect(session, _workflow(0))
    links.expect(session, _workflow(MAX_RECORDS))
    waiting = {place.workflow for place in links._records}
    assert len(waiting) == MAX_RECORDS
    assert _workflow(0) in waiting and _workflow(1) not in waiting


def test_workflows_without_an_id_are_never_taken_for_each_other(tmp_path: Path) -> None:
    links = _workflow_links(tmp_path)
    links.expect(_Session(_graph("1" * 64)), WorkflowRef("workflows/a.json", "default", None))
    links.moved(WorkflowRef("workflows/b.json", "default", None))
    assert len(links._records) == 1
