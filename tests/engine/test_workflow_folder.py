"""A saved workflow keeps the graphs that its runs used in a folder beside it."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from warmgraph_backends.engine import WorkflowRef
from warmgraph_backends.errors import GraphsNameError
from warmgraph_backends.storing.folders import NOTICE, folder_keys, list_folders, read_record
from warmgraph_tools.inprocess import Host

from .lab import Lab
from .probed import Probed

QUICK = "Transformer entry 64"  # its build takes least
KINDS = 8


def _save(lab: Lab, name: str, identifier: str | None = "id-1") -> WorkflowRef:
    """Save a workflow and let the next prompts come from it."""
    file = lab.workflows / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")
    lab.workflow = WorkflowRef(f"workflows/{name}.json", "default", identifier)
    return lab.workflow


def _folder(lab: Lab, name: str) -> Path:
    return lab.workflows / f"{name}.graphs"


def _keys(model: Probed) -> list[str]:
    return sorted(kind["key"] for kind in model.report()["kinds"])


def _run(lab: Lab, model: Probed) -> None:
    model.sample()
    lab.settle()


def test_a_run_links_its_graphs_into_the_folder_beside_its_workflow(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    model = Probed(lab, host)
    _run(lab, model)
    assert list(lab.workflows.iterdir()) == []  # not saved: the shared store only
    _save(lab, "portrait")
    _run(lab, model)
    folder = _folder(lab, "portrait")
    assert folder_keys(folder) == _keys(model)
    for key in _keys(model):
        assert (folder / f".{key}.safetensors").samefile(lab.store / f"{key}.safetensors")
    assert [name for name in os.listdir(folder) if not name.startswith(".")] == [NOTICE]
    record = read_record(folder)
    assert record is not None and sorted(record.graphs) == _keys(model)
    assert (record.workflow, record.id) == ("workflows/portrait.json", "id-1")


def test_graphs_that_arrive_after_the_run_are_filed_when_they_do(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab(without=(QUICK,))
    _save(lab, "sub/slow")
    model = Probed(lab, host, when_missing="background")
    lab.settle()
    model.sample()
    report = model.report()
    reasons = {entry["reason"] for entry in report["eager"]}
    assert "it is being compiled" in reasons and report["builds"] == 0
    lab.workflow = None  # the prompt is over, and nothing runs any more
    lab.settle()
    if not lab.is_settled(model.model):  # each is filed as it comes, the last one by now perhaps
        assert len(folder_keys(_folder(lab, "sub/slow"))) in (KINDS - 1, KINDS)
    lab.wait_until(lambda: lab.is_settled(model.model))
    lab.settle()
    assert folder_keys(_folder(lab, "sub/slow")) == _keys(model)
    assert lab.counts(model.model) == (1, KINDS - 1, 0)
    model.check(size=(13, 9), batch=2)
    Probed(lab, host, seed=1).check()
    assert lab.builds() == lab.jobs() == 1


def test_graphs_that_load_after_the_run_are_filed_when_they_do(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    with lab.held():
        _save(lab, "late")
        model = Probed(lab, host, when_missing="background")
        model.sample()
        lab.workflow = None
        assert not _folder(lab, "late").exists()
    lab.settle()
    assert folder_keys(_folder(lab, "late")) == _keys(model)


@pytest.mark.parametrize("graphs", ["", "my graphs"])
def test_graphs_of_a_model_that_is_gone_are_filed_when_they_come(
    host: Host, make_lab: Callable[..., Lab], graphs: str
) -> None:
    """As after a prompt with another model, while the first one's graphs are still built."""
    lab = make_lab()
    with lab.held():
        _save(lab, "first")
        model = Probed(lab, host, when_missing="background", graphs=graphs)
        model.sample()
        lab.workflow = None
        keys, session = _keys(model), weakref.ref(model.model.get_attachment("warmgraph"))
        del model
        host.unload()
        gc.collect()
        assert session() is None, "what is to be filed keeps no model alive"
    lab.settle()
    assert folder_keys(_folder(lab, graphs or "first")) == keys
    assert lab.is_all_filed()


def test_a_workflow_that_is_renamed_while_graphs_are_built_gets_them(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    with lab.held():
        _save(lab, "before")
        model = Probed(lab, host, when_missing="background")
        model.sample()
        keys = _keys(model)
        del model
        host.unload()
        gc.collect()
        (lab.workflows / "before.json").unlink()
        lab.engine.prompt_posted(_save(lab, "after"))
    lab.settle()
    assert folder_keys(_folder(lab, "after")) == keys
    assert not _folder(lab, "before").exists()


def test_two_workflows_of_one_model_both_get_its_graphs(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    with lab.held():
        model = Probed(lab, host, when_missing="background")
        for name in ("one", "two"):
            _save(lab, name, identifier=name)
            model.sample()
    lab.settle()
    assert folder_keys(_folder(lab, "one")) == folder_keys(_folder(lab, "two")) == _keys(model)


@pytest.mark.parametrize("renamed", ["new name", "elsewhere/below/old"])
def test_a_renamed_or_moved_workflow_finds_its_folder_again(
    host: Host, make_lab: Callable[..., Lab], renamed: str
) -> None:
    lab = make_lab()
    _save(lab, "old")
    model = Probed(lab, host)
    _run(lab, model)
    assert folder_keys(_folder(lab, "old")) == _keys(model)
    (lab.workflows / "old.json").unlink()
    _save(lab, renamed)
    shutil.rmtree(lab.store)  # only the folder has them now
    lab.store.mkdir()
    again = _restarted(lab)
    try:
        model = Probed(again, host, when_missing="never")
        again.settle()
        assert again.counts(model.model) == (0, KINDS, 0)
        _run(again, model)
        assert folder_keys(_folder(again, renamed)) == _keys(model)
        assert not _folder(again, "old").exists()
    finally:
        again.engine.close()


def _restarted(lab: Lab) -> Lab:
    """The engine of a server that was started again over the same folders."""
    again = Lab(lab.root)
    again.workflow = lab.workflow
    return again


def test_a_prompt_served_from_the_hosts_cache_still_follows_a_rename(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    _save(lab, "before")
    model = Probed(lab, host)
    _run(lab, model)
    (lab.workflows / "before.json").unlink()
    lab.engine.prompt_posted(_save(lab, "after"))
    lab.settle()
    assert folder_keys(_folder(lab, "after")) == _keys(model)
    assert not _folder(lab, "before").exists()


def test_a_copy_of_a_workflow_gets_graphs_of_its_own(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    _save(lab, "original")
    model = Probed(lab, host)
    _run(lab, model)
    _save(lab, "copy")
    _run(lab, model)
    assert (
        folder_keys(_folder(lab, "copy")) == folder_keys(_folder(lab, "original")) == _keys(model)
    )


def test_a_name_on_the_node_wins_over_the_workflows(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    _save(lab, "saved")
    model = Probed(lab, host, graphs="my graphs")
    _run(lab, model)
    assert folder_keys(_folder(lab, "my graphs")) == _keys(model)
    assert not _folder(lab, "saved").exists()
    assert list_folders(lab.workflows) == ["my graphs"]
    with pytest.raises(GraphsNameError, match="one plain folder name"):
        Probed(lab, host, graphs="../../x")


def test_a_path_that_leads_out_of_the_users_folder_is_refused_in_a_line(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab()
    lab.workflow = WorkflowRef("workflows/../../../etc/x.json", "default", "id-1")
    model = Probed(lab, host)
    _run(lab, model)
    assert any("workflow path must be" in note for note in model.report()["notes"])
    assert list(lab.workflows.iterdir()) == []
    model.check()
