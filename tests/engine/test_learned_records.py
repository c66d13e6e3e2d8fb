"""What was learned of a model is found again: by its structure, whatever its weights, in another
process, and only where it was signed here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.families.catalogue import plan_model
from warmgraph_backends.learning.blocks import ReadAttributes
from warmgraph_backends.learning.structure import structure_of
from warmgraph_backends.learning.values import name_of
from warmgraph_backends.plans.plan import Plan
from warmgraph_backends.reasons import Reason
from warmgraph_backends.storing import records
from warmgraph_backends.storing.records import SUFFIX, Records
from warmgraph_backends.storing.signing import Signer
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host
from warmgraph_tools.watched import FIRST, sample

from . import learned_models
from .learned import CALLS, arguments, learned_of

NAME = "a1" * 32


@pytest.fixture
def models(host: Host) -> Iterator[Any]:
    yield learned_models.load()
    learned_models.unload()


@pytest.fixture
def kept(tmp_path: Path) -> Records:
    return Records(tmp_path / "learned", Signer(tmp_path / "private"))


# --- a structure's name ---------------------------------------------------------------------------


def test_weights_and_where_they_lie_are_no_part_of_a_structure(models: Any) -> None:
    name = structure_of(models.Model())
    assert len(name) == 64
    model = models.Model()
    model.to(torch.bfloat16).eval().requires_grad_(False)
    model.dtype = torch.bfloat16  # as many of the host's note theirs
    other = structure_of(model)
    model.dtype = torch.float32
    assert structure_of(model) == other
    assert structure_of(models.Model().eval()) == name


def test_a_setting_a_size_or_a_class_makes_another_structure(models: Any) -> None:
    name = structure_of(models.Model())
    scaled, deeper, wider = models.Model(), models.Model(), models.Model()
    scaled.blocks[1].scale = 2.0
    deeper.blocks.append(models.Block())
    wider.blocks[0] = models.Block(128)
    found = [structure_of(each) for each in (scaled, deeper, wider, models.InPlace())]
    assert len({name, *found}) == 5


def test_any_change_of_a_models_code_makes_another_structure(host: Host) -> None:
    """Of a block's, and of the root's, which may go on with what a block wrote into."""
    names = []
    for old, new in (
        ("", ""),
        ("return x + self.mix(x, vec", "x = x + 0\n        return x + self.mix(x, vec"),
        ("vec = context.mean(1)", "vec = 2 * context.mean(1)"),
    ):
        assert old in learned_models.SOURCE
        module = learned_models.load(learned_models.SOURCE.replace(old, new, 1))
        try:
            names.append(structure_of(module.Model()))
        finally:
            learned_models.unload()
    assert len(set(names)) == 3


def test_what_loading_and_running_note_is_no_part_of_it(host: Host) -> None:
    """After a step, of another load, and in another dtype."""
    model = transformers.load("ernie")
    root = model.model.diffusion_model
    name = structure_of(root)
    sample(host, "ernie", model, FIRST)
    assert structure_of(root) == name
    assert structure_of(transformers.load("ernie").model.diffusion_model) == name
    root.to(torch.float64)
    assert structure_of(root) == name


def test_what_loading_notes_is_no_change_of_a_blocks_settings(host: Host) -> None:
    """On layers that have weights of their own, too, as JoyImage's modulation."""
    model = transformers.load("joyimage")
    read = ReadAttributes(model.model.diffusion_model.double_blocks[0])
    sample(host, "joyimage", model, FIRST)
    assert not read.have_changed()
    host.unload()
    assert not read.have_changed()


# --- records on disk ------------------------------------------------------------------------------


def test_a_record_is_found_by_the_next_server(kept: Records, tmp_path: Path) -> None:
    record = {"root": "a:B", "ways": [], "blocks": [["x", "y:Z", []]], "outside": []}
    assert kept.find(NAME) is None
    kept.keep(NAME, record)
    again = Records(tmp_path / "learned", Signer(tmp_path / "private"))
    assert again.find(NAME) == kept.find(NAME) == record
    assert again.find("b2" * 32) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace('"a:B"', '"os:C"'),
        lambda text: text.replace('"signature":"', '"signature":"0'),
        lambda text: text[:-9],
        lambda text: json.dumps([1]),
        lambda text: json.dumps({"record": {}}),
        lambda text: "[" * 100_000,
        lambda text: text + " " * (5 << 20),
        lambda text: "\udcff",
    ],
)
def test_what_was_not_signed_here_is_not_read(kept: Records, tmp_path: Path, spoil: Any) -> None:
    kept.keep(NAME, {"root": "a:B"})
    path = tmp_path / "learned" / f"{NAME}{SUFFIX}"
    path.write_text(spoil(path.read_text()), "utf-8", errors="surrogateescape")
    again = Records(tmp_path / "learned", Signer(tmp_path / "private"))
    assert again.find(NAME) is None
    again.keep(NAME, {"root": "c:D"})
    assert Records(tmp_path / "learned", Signer(tmp_path / "private")).find(NAME) == {"root": "c:D"}


def test_another_machines_record_and_one_of_another_structure_are_not_read(
    kept: Records, tmp_path: Path
) -> None:
    kept.keep(NAME, {"root": "a:B"})
    elsewhere = Records(tmp_path / "learned", Signer(tmp_path / "other"))
    assert elsewhere.find(NAME) is None
    folder, other = tmp_path / "learned", "b2" * 32
    (folder / f"{NAME}{SUFFIX}").rename(folder / f"{other}{SUFFIX}")
    assert Records(folder, Signer(tmp_path / "private")).find(other) is None


def test_records_lie_beside_workflows_too(kept: Records, tmp_path: Path) -> None:
    graphs = tmp_path / "NAME.graphs"
    graphs.mkdir()
    assert not kept.carry(NAME, graphs)
    kept.keep(NAME, {"root": "a:B"})
    assert kept.carry(NAME, graphs)
    [file] = graphs.iterdir()
    assert file.name == f".{NAME}{SUFFIX}"  # the host lists files that are not hidden
    before = file.stat().st_mtime_ns
    assert kept.carry(NAME, graphs)
    assert file.stat().st_mtime_ns == before
    emptied = Records(tmp_path / "gone", Signer(tmp_path / "private"))
    assert emptied.find(NAME) is None
    assert emptied.find(NAME, [tmp_path / "nowhere", graphs]) == {"root": "a:B"}


def test_drafts_of_writers_that_were_killed_go(kept: Records, tmp_path: Path) -> None:
    """An hour after; one that is being written stays."""
    folder = tmp_path / "learned"
    folder.mkdir()
    old, new = (folder / f".{NAME}{SUFFIX}.{i}.0123abcd.tmp" for i in (1, 2))
    for draft in (old, new):
        draft.write_text("half")
    os.utime(old, (time.time() - 7200,) * 2)
    kept.keep(NAME, {"root": "a:B"})
    assert new.exists() and not old.exists()


def test_a_folder_or_a_pipe_in_a_records_place_is_no_record(kept: Records, tmp_path: Path) -> None:
    folder = tmp_path / "learned"
    (folder / f"{NAME}{SUFFIX}").mkdir(parents=True)
    assert kept.find(NAME) is None
    other = "b2" * 32
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / f"{other}{SUFFIX}")
    assert kept.find(other) is None


@pytest.mark.parametrize("name", ["", "a" * 63, "../" + "a" * 61, "A1" * 32, "a1" * 33])
def test_only_a_structures_name_becomes_a_file(kept: Records, name: str) -> None:
    for ask in (lambda: kept.find(name), lambda: kept.keep(name, {})):
        with pytest.raises(ValueError, match="64 hex digits"):
            ask()


def test_the_oldest_records_go(
    kept: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "KEPT", 3)
    names = [f"{i:064x}" for i in range(5)]
    for i, name in enumerate(names):
        kept.keep(name, {"root": f"a:B{i}"})
        past = time.time() - 100 + i
        os.utime(tmp_path / "learned" / f"{name}{SUFFIX}", (past, past))
    left = {path.stem for path in (tmp_path / "learned").iterdir()}
    assert left == set(names[-3:])
    assert kept.find(names[0]) == {"root": "a:B0"}  # this process knows it still


# --- a plan by a record ---------------------------------------------------------------------------


def test_a_model_is_cut_by_its_record(models: Any, kept: Records, tmp_path: Path) -> None:
    """As a new server finds it: nothing is watched, and the plan is the same."""
    root = models.Model()
    assert isinstance(plan_model(root), Reason)
    record = learned_of(models.Model, *arguments(*CALLS[0]))
    kept.keep(structure_of(root), record)
    again = Records(tmp_path / "learned", Signer(tmp_path / "private"))
    found = again.find(structure_of(models.Model()))
    plan = plan_model(models.Model(), found)
    assert isinstance(plan, Plan)
    assert [place.name for place in plan.places] == ["blocks.0", "blocks.1"]
    assert again.find(structure_of(models.InPlace())) is None


def test_a_record_of_another_model_and_one_for_a_family_count_for_nothing(
    host: Host, models: Any
) -> None:
    record = learned_of(models.Model, *arguments(*CALLS[0]))
    assert isinstance(plan_model(models.InPlace(), record), Reason)
    root = transformers.load("flux1").model.diffusion_model
    written, cut = plan_model(root), plan_model(root, {**record, "root": name_of(type(root))})
    assert isinstance(written, Plan) and isinstance(cut, Plan)
    assert [p.name for p in cut.places] == [p.name for p in written.places]
