"""A torch whose private API is another one: images are the host's, words say what is missing, and
nothing is tried again at each prompt.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from warmgraph_backends.compilers import registry
from warmgraph_backends.debugging import Debugging
from warmgraph_tools.inprocess import Host

from . import made_up_compiler
from .lab import TOLERANCE, Lab
from .lacking_worker import COMPILER, LACKS, ROLL
from .probed import Probed

WORKER = Path(__file__).with_name("lacking_worker.py")
KINDS = 8
MakeLab = Callable[..., Lab]


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("torch._inductor:standalone_compile", "has no standalone_compile"),
        ("torch._inductor.codecache:PyCodeCache", "PyCodeCache"),
    ],
    ids=["at its start", "in a build"],
)
def test_workers_that_cannot_compile_are_asked_once(
    host: Host,
    make_lab: MakeLab,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    lacks: str,
    words: str,
) -> None:
    caplog.set_level(logging.WARNING)
    roll = tmp_path / "roll"
    monkeypatch.setenv(LACKS, lacks)
    monkeypatch.setenv(ROLL, str(roll))
    lab = make_lab(empty=True)
    lab.settings.update({"workers": 2})
    monkeypatch.setattr(lab.engine._builder, "_script", WORKER)
    started = set()
    for _ in range(3):  # prompts, each with a model of its own
        model = Probed(lab, host, when_missing="wait")
        assert torch.equal(model.sample(), model.sample(model.plain))
        kinds = model.report()["kinds"]
        assert [kind["state"] for kind in kinds] == ["failed"] * KINDS
        for kind in kinds:
            assert words in kind["reason"] and f"torch {torch.__version__}" in kind["reason"]
        started.add(len(roll.read_text().splitlines()))
    assert len(started) == 1 and started <= {1, 2}
    assert lab.builds() == 0
    lines = [record.getMessage() for record in caplog.records]
    said = [line for line in lines if "Nothing is compiled until the server starts anew" in line]
    assert len(said) == 1 and words in said[0]


def test_a_server_that_cannot_compile_has_no_worker_and_says_why(
    host: Host, make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._inductor, "standalone_compile")
    lab = make_lab()
    for _ in range(2):
        for form in ("auto", "exact"):
            model = Probed(lab, host, when_missing="wait", form=form)
            assert torch.equal(model.sample(), model.sample(model.plain))
            (note,) = model.report()["notes"]
            if form == "auto":
                assert f"torch {torch.__version__} has no standalone_compile" in note
            else:  # which needs no compiler, but a GPU
                assert "identical pixels: nothing is compiled; that needs an NVIDIA GPU" in note
    assert lab.jobs() == 0


def test_a_server_that_cannot_load_says_why_and_leaves_its_files(
    host: Host, make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab()
    files = sorted(lab.store.iterdir())
    name = "_torchinductor_pyobject_tensor_data_ptr"
    monkeypatch.delattr(importlib.import_module("torch._C._dynamo.guards"), name)
    for _ in range(2):
        model = Probed(lab, host, when_missing="never")
        assert torch.equal(model.sample(), model.sample(model.plain))
        lab.settle()  # a prompt looks for files that are missing
        for entry in model.report()["eager"]:
            assert name in entry["reason"] and f"torch {torch.__version__}" in entry["reason"]
    assert sorted(lab.store.iterdir()) == files
    monkeypatch.undo()
    model = Probed(make_lab(), host, when_missing="never")
    model.lab.settle()
    model.check()


@pytest.fixture
def another_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is made up, here and in workers, with a torch whose own cannot be called."""
    monkeypatch.delattr(torch._inductor, "standalone_compile")
    monkeypatch.setenv(LACKS, "torch._inductor:standalone_compile")
    monkeypatch.setenv(ROLL, str(tmp_path / "roll"))
    monkeypatch.setenv(COMPILER, str(made_up_compiler.__file__))
    monkeypatch.setattr(registry, "COMPILERS", registry.COMPILERS)
    made_up_compiler.add()


@pytest.mark.usefixtures("another_compiler")
def test_another_compiler_needs_nothing_of_inductors(
    host: Host, make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dump = tmp_path / "dump"
    lab = make_lab(empty=True, debugging=Debugging(dump=dump))
    monkeypatch.setattr(lab.engine._builder, "_script", WORKER)
    model = Probed(lab, host, when_missing="wait", backend="auto")
    model.sample()
    report = model.report()
    assert report["backend"] == "traced" and "has no standalone_compile" in report["notes"][0]
    assert lab.builds() == KINDS
    assert max(call.error for call in model.probe.calls) <= TOLERANCE
    before = report["calls"]
    model.sample(size=(8, 16))
    calls = model.report()["calls"]
    assert calls["compiled"] > before["compiled"] and calls["eager"] == before["eager"]
    assert lab.builds() == KINDS and max(c.error for c in model.probe.calls) <= TOLERANCE
    sources = [path.read_text() for path in dump.glob("*/source.py")]
    assert len(sources) == KINDS and all("def forward" in source for source in sources)


@pytest.mark.usefixtures("another_compiler")
def test_what_a_compiler_lacks_in_a_worker_alone_is_said_once(
    host: Host,
    make_lab: MakeLab,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lab = make_lab(empty=True)
    monkeypatch.setattr(lab.engine._builder, "_script", WORKER)
    lab.engine._builder.pause(True)
    model = Probed(lab, host, when_missing="background", backend="traced")
    monkeypatch.setenv(made_up_compiler.UNMET, "it is on holiday")  # for workers alone
    lab.engine._builder.pause(False)
    lab.wait_until(lambda: {kind["state"] for kind in model.report()["kinds"]} == {"failed"})
    assert torch.equal(model.sample(), model.sample(model.plain))
    kinds = model.report()["kinds"]
    assert [kind["state"] for kind in kinds] == ["failed"] * KINDS
    assert all("it is on holiday" in kind["reason"] for kind in kinds)
    assert sum("it is on holiday; install it" in line for line in caplog.messages) == 1
    assert lab.builds() == 0 and len((tmp_path / "roll").read_text().splitlines()) <= 2
