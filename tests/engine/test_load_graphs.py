"""Load Compiled Graph: a folder's graphs or eager, never a build; strict refuses in words."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.errors import GraphsNameError, StrictError
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .lab import Lab
from .probed import Probed

ROOT = Path(__file__).resolve().parents[2]
KINDS = 8
NAME = "portrait"


def _file_graphs(lab: Lab, host: Host) -> Path:
    """A graph folder that another process will load: it is all that is left of the store."""
    Probed(lab, host, graphs=NAME).sample()
    lab.settle()
    shutil.rmtree(lab.store)
    return lab.workflows / f"{NAME}.graphs"


@pytest.fixture
def folder(host: Host, make_lab: Callable[..., Lab]) -> Path:
    return _file_graphs(make_lab(), host)


@pytest.fixture
def fresh(folder: Path, make_lab: Callable[..., Lab]) -> Lab:
    """An engine with the folder's signing key and an empty store."""
    lab = make_lab()
    shutil.rmtree(lab.store)
    shutil.copytree(folder, lab.workflows / folder.name)
    return lab


def _load(lab: Lab, host: Host, *, strict: bool) -> Probed:
    model = Probed(lab, host, when_missing="never")
    model.model = lab.engine.load_graphs(model.probe.attach(model.plain), NAME, strict=strict)
    return model


def _kind(lab: Lab, path: Path) -> str:
    manifest = lab.engine._store.read_manifest(path)
    return str(manifest.kind)


@pytest.mark.parametrize("strict", [True, False])
def test_a_whole_folder_runs_all_compiled(fresh: Lab, host: Host, strict: bool) -> None:
    model = _load(fresh, host, strict=strict)
    assert fresh.counts(model.model) == (0, KINDS, 0)
    model.check(size=(13, 9), batch=2)
    assert fresh.jobs() == 0


def test_a_missing_graph_runs_eager_and_strict_refuses_naming_it(fresh: Lab, host: Host) -> None:
    folder = fresh.workflows / f"{NAME}.graphs"
    next(p for p in folder.glob(".*.safetensors") if "Down" in _kind(fresh, p)).unlink()
    with pytest.raises(StrictError, match="2 places: no compiled graph") as refusal:
        _load(fresh, host, strict=True)
    assert "Compile Model" in str(refusal.value) and NAME in str(refusal.value)
    model = _load(fresh, host, strict=False)
    model.sample(steps=2)
    report = model.report()
    assert [miss["kind"] for miss in report["misses"]] == ["Downsample 64"]
    assert report["regions"]["eager"] == 2 and report["calls"]["compiled"] > 0
    assert all(call.error < 1e-4 and not call.is_equal for call in model.probe.calls)
    assert fresh.jobs() == 0


def test_a_folder_of_another_model_runs_eager_and_says_what_differs(fresh: Lab, host: Host) -> None:
    model, clip, _ = host.load("narrow15")
    loaded = fresh.engine.load_graphs(model, NAME, strict=False)
    prompt = host.encode(clip, "a cat")
    assert (
        torch.equal(
            host.sample(loaded, prompt, prompt, steps=1),
            host.sample(model, prompt, prompt, steps=1),
        )
        or fresh.engine.report(loaded)["regions"]["compiled"]
    )
    reasons = {miss["reason"] for miss in fresh.engine.report(loaded)["misses"]}
    assert reasons and all(reason.startswith("no compiled graph") for reason in reasons)
    with pytest.raises(StrictError):
        fresh.engine.load_graphs(model, NAME, strict=True)
    assert fresh.jobs() == 0


def test_a_model_without_regions_passes_through_and_strict_says_why(fresh: Lab, host: Host) -> None:
    aura = transformers.load("aura")
    with pytest.raises(StrictError, match="new to Warmgraph, and here nothing is learned"):
        fresh.engine.load_graphs(aura, NAME, strict=True)
    fresh.settings.update({"learn_models": False})
    loaded = fresh.engine.load_graphs(aura, NAME, strict=False)
    line = "this MMDiT has no regions"
    assert fresh.engine.report(loaded)["notes"][0].startswith(line)
    with pytest.raises(StrictError, match=line):
        fresh.engine.load_graphs(aura, NAME, strict=True)


def test_a_folder_that_is_gone_is_named(fresh: Lab, host: Host) -> None:
    shutil.rmtree(fresh.workflows / f"{NAME}.graphs")
    model = _load(fresh, host, strict=False)
    report = model.report()
    assert any(f"there is no folder '{NAME}.graphs'" in note for note in report["notes"])
    assert report["regions"]["compiled"] == 0
    with pytest.raises(StrictError, match=f"there is no folder '{NAME}.graphs'"):
        _load(fresh, host, strict=True)


def test_a_refused_prompt_is_not_told_that_it_runs(fresh: Lab, host: Host) -> None:
    """Nor is a folder that is gone forgotten over what else is missing."""
    fresh.settings.update({"learn_models": False})
    with pytest.raises(StrictError) as refusal:
        fresh.engine.load_graphs(transformers.load("aura"), "gone", strict=True)
    said = str(refusal.value)
    assert "there is no folder 'gone.graphs'" in said and "no regions" in said
    assert "as without" not in said
    with pytest.raises(StrictError) as refusal:
        fresh.engine.load_graphs(transformers.load("aura"), NAME, strict=True)
    assert "no regions" in str(refusal.value) and "as without" not in str(refusal.value)


def test_a_copied_folder_is_eager_until_the_console_trusts_it(
    folder: Path, host: Host, make_lab: Callable[..., Lab], caplog: pytest.LogCaptureFixture
) -> None:
    lab = make_lab(empty=True)  # another machine: another user directory, another signing key
    copy = lab.workflows / folder.name
    shutil.copytree(folder, copy)
    step = f"cli.py trust {copy} --user-directory {lab.root / 'user'}"
    with caplog.at_level(logging.WARNING):
        model = _load(lab, host, strict=False)
        image = model.sample(steps=2)
    assert torch.equal(image, model.sample(model.plain, steps=2))
    report = model.report()
    assert report["regions"]["compiled"] == report["calls"]["compiled"] == 0
    [entry] = report["eager"]
    assert step in entry["reason"] and entry["places"] == report["regions"]["total"]
    assert len([r for r in caplog.records if step in r.getMessage()]) == 1, caplog.text
    with pytest.raises(StrictError, match=re.escape(step)):
        _load(lab, host, strict=True)

    (warning,) = lab.engine.overview.snapshot()["warnings"]
    command = warning["command"]
    assert step in command and entry["reason"].endswith(f" {command}")  # to be copied as it is
    assert (
        _typed(shlex.split(command)).splitlines()[-1]
        == f"{KINDS} compiled graphs trusted, 0 files refused"
    )
    model.sample(steps=1)  # the next prompt finds them, while it runs: nothing is restarted
    lab.settle()
    model.check()
    assert lab.counts(model.model) == (0, KINDS, 0)
    _load(lab, host, strict=True).check(size=(9, 13))
    assert lab.jobs() == 0


def _typed(command: list[Any]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_a_name_that_is_not_from_the_list_is_refused(fresh: Lab, host: Host) -> None:
    model = Probed(fresh, host, when_missing="never")
    loaded = fresh.engine.load_graphs(model.plain, "../" + NAME, strict=False)
    notes = fresh.engine.report(loaded)["notes"]
    assert any("folder must be a name from the list" in note for note in notes)
    assert issubclass(GraphsNameError, ValueError)
