"""Whatever is wrong with names, folders or workers: the image is right and a line says why."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.engine import WorkflowRef
from warmgraph_backends.errors import GraphsNameError
from warmgraph_backends.storing.folders import list_folders
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, relative
from .mishaps import (
    KINDS,
    QUICK,
    MakeLab,
    file_of,
    parts_of,
    restarted,
    right,
    said,
    state_of,
    warnings,
)
from .probed import Probed

pytestmark = pytest.mark.usefixtures("log")


# --- names and folders ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../../x", "C:\\x", "/etc/x", "a/b", "x" * 300, "..", "nul", "a\x00b", " "]
)
def test_a_graphs_name_that_is_no_plain_name_is_refused_in_words(
    host: Host, make_lab: MakeLab, name: str
) -> None:
    lab = make_lab(empty=True)
    model = host.load("narrowxl")[0]

    def tree() -> list[Path]:
        private = lab.root / "user" / "__warmgraph"
        return sorted(p for p in lab.root.rglob("*") if private not in p.parents)

    before = tree()
    with pytest.raises(GraphsNameError) as refusal:
        lab.engine.compile_model(model, graphs=name, when_missing="never")
    assert len(str(refusal.value)) < 400 and refusal.value.remedy
    loaded = lab.engine.load_graphs(model, name, strict=False)
    assert lab.engine.report(loaded)["regions"]["compiled"] == 0
    assert lab.engine.report(loaded)["notes"]
    assert tree() == before


def test_a_unicode_name_is_a_folder_like_any_other(host: Host, make_lab: MakeLab) -> None:
    lab = make_lab()
    model = Probed(lab, host, when_missing="never", graphs="Größe 図")
    right(model)
    lab.settle()
    folder = lab.workflows / "Größe 図.graphs"
    assert len(list(folder.glob(".*.safetensors"))) == KINDS
    assert list_folders(lab.workflows) == ["Größe 図"]


@pytest.mark.slow  # tests/unit/test_store_faults.py has what the store says
def test_a_store_that_cannot_be_written_keeps_new_graphs_in_memory(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    """A file stands where the store's folder should be; all but one graph lie with the workflow."""
    lab = make_lab()
    (lab.workflows / "portrait.json").write_text("{}")
    lab.workflow = WorkflowRef("workflows/portrait.json", "default", "id-1")
    right(Probed(lab, host, when_missing="never"))
    lab.settle()
    folder = lab.workflows / "portrait.graphs"
    (folder / f".{file_of(lab).name}").unlink()
    lab.store.rename(lab.root / "elsewhere")
    lab.store.write_text("not a folder")
    lab = restarted(lab)
    model = Probed(lab, host, when_missing="wait")
    right(model)
    lab.settle()
    assert lab.counts(model.model) == (1, KINDS - 1, 0)
    assert state_of(model)["bytes"] is None and state_of(model)["state"] == "ready"
    assert said(log, "is not kept on disk") == 1 and said(log, "make that folder writable") == 1
    assert lab.store.read_text() == "not a folder"
    assert len(list(folder.glob(".*.safetensors"))) == KINDS - 1


def test_a_private_folder_that_cannot_be_written_leaves_all_eager(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    """Without a signing key no file can be trusted."""
    lab = make_lab()
    before = sorted(lab.store.iterdir())
    key = lab.root / "user" / "__warmgraph" / "signing.key"
    key.unlink()
    key.mkdir()
    lab = restarted(lab)
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    right(model)
    reasons = model.report()["eager"]
    assert len(reasons) == 1 and "the signing key" in reasons[0]["reason"]
    assert sorted(lab.store.iterdir()) == before


# --- builds that fail -----------------------------------------------------------------------------


def test_without_a_compiler_the_model_is_eagers_and_says_what_is_missing(
    host: Host,
    make_lab: MakeLab,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:
    lab = make_lab(empty=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    model = Probed(lab, host)
    lab.settle()
    assert torch.equal(model.sample(), model.sample(model.plain))
    (left,) = model.report()["eager"]
    assert "no C++ compiler" in left["reason"] and left["places"] == 38
    assert said(log, "nothing compiles here: no C++ compiler") == 1


def test_a_build_that_fails_is_named_tried_once_more_and_then_left(
    host: Host,
    make_lab: MakeLab,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:
    """The worker's compiler breaks (CXX), so Inductor itself raises."""
    for name in ("broken", "broken_too"):
        (tmp_path / name).write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "broken"))
    lab = make_lab(without=(QUICK,))
    model = Probed(lab, host, when_missing="wait")
    right(model)
    reason = state_of(model)["reason"]
    assert state_of(model)["state"] == "failed"
    assert reason.startswith(f"compiling failed: Inductor failed on {QUICK}")
    assert lab.counts(model.model) == (0, KINDS - 1, model.report()["eager"][0]["places"])
    monkeypatch.setenv("CXX", str(tmp_path / "broken_too"))
    for _ in range(2):
        lab.compiled(model.plain)
        right(model)
    assert said(log, f"{QUICK} runs at normal speed: Inductor failed") == 2


def test_a_class_that_no_worker_can_import_is_named_and_the_rest_is_compiled(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    class Local(torch.nn.Dropout):
        pass

    lab = make_lab()
    model = Probed(lab, host, when_missing="never")
    blocks = [m for m in model.unet.modules() if type(m).__name__ == "ResBlock"]
    blocks[0].out_layers[2] = Local(0.0)
    blocks[1].out_layers[2] = Importable(0.0)
    model.model = lab.compiled(model.probe.attach(model.plain))
    right(model)
    reasons = {entry["reason"]: entry["places"] for entry in model.report()["eager"]}
    assert any("Local is made at run time, so no worker can import it" in r for r in reasons)
    assert any("Importable cannot be imported" in r for r in reasons)
    assert sum(reasons.values()) == 2


class Importable(torch.nn.Dropout):
    """Importable here, but not where the worker runs: this folder is no package there."""


def test_a_worker_that_sees_other_host_code_refuses_and_names_it(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One of a ComfyUI whose files were updated meanwhile would build another graph."""
    block = "Transformer block 64"
    lab = make_lab(without=(block,))
    hello = lab.hello
    tree = Path(hello["host"])
    shutil.copytree(tree / "comfy", tmp_path / "comfy", ignore=shutil.ignore_patterns("*.pyc"))
    for part in tree.iterdir():
        if part.name != "comfy":
            (tmp_path / part.name).symlink_to(part, target_is_directory=part.is_dir())
    module = tmp_path / "comfy" / "ldm" / "modules" / "attention.py"
    code, gate = module.read_text("utf-8"), "return x * F.gelu(gate)"
    assert gate in code
    module.write_text(code.replace(gate, "return F.gelu(gate) * x"), "utf-8")
    hello["host"] = str(tmp_path)
    model = Probed(lab, host, when_missing="wait")
    right(model)
    reason = state_of(model, block)["reason"]
    assert "the worker sees other host code for Transformer block 64" in reason
    assert "comfy.ldm.modules.attention:GEGLU" in reason


def _running_worker(lab: Lab) -> int:
    """The process of the worker that builds now."""
    builder = lab.engine._builder
    lab.wait_until(lambda: bool(builder.progress().running))
    process = next(thread._process for thread in builder._threads)
    assert process is not None
    return process.pid


@pytest.mark.slow  # tests/unit/builder kills workers that build nothing
def test_a_worker_killed_in_the_middle_costs_one_build_and_the_next_prompt_tries_again(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab(without=(QUICK,))
    model = Probed(lab, host, when_missing="background")
    os.kill(_running_worker(lab), getattr(signal, "SIGKILL", signal.SIGTERM))
    lab.wait_until(lambda: lab.is_settled(model.model))
    right(model)
    assert said(log, f'the worker that built "{QUICK}" died') >= 1
    model.model = lab.compiled(model.probe.attach(model.plain))
    model.check()
    assert lab.builds() == 1


# --- people ---------------------------------------------------------------------------------------


class _InterruptError(Exception):
    pass


@pytest.mark.slow  # test_background.py cancels a wait, too
def test_cancel_stops_the_wait_at_once_and_the_builds_go_on_without_the_model(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab(without=(QUICK,))
    pressed = threading.Event()
    told: list[float] = []

    def cancelled() -> None:
        if pressed.is_set():
            told.append(time.monotonic())
            raise _InterruptError

    lab.cancelled = cancelled
    model: Any = host.load("narrowxl")[0]
    timer = threading.Timer(0.0, lambda: (_running_worker(lab), pressed.set()))
    timer.start()
    with pytest.raises(_InterruptError):
        lab.compiled(model)
    assert time.monotonic() - told[0] < 1.0
    del model  # the user loads another model while the worker is at it
    host.unload()
    gc.collect()
    assert lab.engine.overview.snapshot()["models"] == []
    lab.cancelled = lambda: None
    lab.wait_until(lambda: lab.builds() == 1)
    lab.settle()
    assert file_of(lab).is_file()
    after = Probed(lab, host)
    after.check()
    assert lab.jobs() == 1
    assert warnings(log) == []


@pytest.mark.slow  # tests/unit/test_store.py lets two processes put the same graph at once
def test_two_servers_that_share_a_user_directory_build_the_same_at_once(
    host: Host, make_lab: MakeLab, log: pytest.LogCaptureFixture
) -> None:
    lab = make_lab(without=(QUICK,))
    other = Lab(lab.root)
    try:
        both = [Probed(each, host, when_missing="background") for each in (lab, other)]
        for each in both:
            right(each)
        for each in both:
            each.lab.wait_until(lambda each=each: each.lab.is_settled(each.model))
            each.check()
        assert (lab.builds(), other.builds()) in [(1, 1), (1, 0), (0, 1)]
        parts_of(lab, file_of(lab))  # whole and signed
    finally:
        other.engine.close()
    assert not [line for line in warnings(log) if "normal speed: it is being" not in line]


def test_a_model_unloaded_between_runs_needs_no_new_graph(host: Host, make_lab: MakeLab) -> None:
    lab = make_lab()
    model = Probed(lab, host, when_missing="never")
    lab.settle()
    image = right(model)
    host.unload()
    assert relative(right(model), image) <= TOLERANCE
    model.check()
