"""A model that nobody described is learned from one step of a run, and served like any other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.runtime import learner
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, call_instead
from .learned_serving import CALLS, RECORDS, Served
from .processes import seen_by

KIND = "ernie"


@pytest.fixture(autouse=True)
def _unloaded(host: Host) -> Iterator[None]:
    with torch.inference_mode():
        yield
    host.unload()


@pytest.fixture(scope="module")
def learned(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """An engine that has learned a model, and built its graphs."""
    lab = Lab(tmp_path_factory.mktemp("learned"))
    with torch.inference_mode():
        Served(host, lab, KIND).learn()
    yield lab
    lab.engine.close()


@pytest.fixture
def again(learned: Lab, tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """As a new server finds its folders."""
    labs: list[Lab] = []

    def start(*, learns: bool = True, forgets: bool = False) -> Lab:
        lab = learned.copy_to(tmp_path / str(len(labs)))
        labs.append(lab)
        lab.settings.update({"learn_models": learns})
        if forgets:
            shutil.rmtree(lab.root / RECORDS)
        return lab

    yield start
    for lab in labs:
        lab.engine.close()


@pytest.fixture(scope="module")
def one(learned: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = learned.copy_to(tmp_path_factory.mktemp("one") / "lab")
    yield lab
    lab.engine.close()


@pytest.fixture
def unlearned(one: Lab) -> Lab:
    """As a new server finds the graphs alone; its worker goes on from test to test."""
    shutil.rmtree(one.root / RECORDS, ignore_errors=True)
    learned = one.engine._shared.lessons
    learned._lessons.clear()
    learned._records._known.clear()
    return one


def test_a_model_is_learned_in_its_first_step_and_then_compiled(host: Host, learned: Lab) -> None:
    """Of any size, with no build after the first."""
    assert (learned.jobs(), learned.builds()) == (2, 1)
    served = Served(host, learned, KIND)
    served.settle()
    for sizes in CALLS:
        served.check(sizes)
    assert (learned.jobs(), learned.builds()) == (2, 1)
    lines = [line["text"] for line in served.report["lines"]]
    assert "Ernie-Image: learned; 2 of 2 parts compiled" in lines


def test_graphs_are_asked_for_when_a_worker_has_learned_not_when_the_next_run_begins(
    host: Host, unlearned: Lab
) -> None:
    """While the user looks at the first image; they are filed beside its workflow."""
    lab = unlearned
    served = Served(host, lab, KIND, graphs="portrait")
    assert served.run() == (0, 0.0)
    served.settle()
    assert [graph.state.value for graph in served.session.graphs] == ["ready"]
    folder = lab.workflows / "portrait.graphs"
    assert {".safetensors", ".learned"} <= {path.suffix for path in folder.iterdir()}
    served.check()


def test_what_is_learned_within_a_run_waits_for_its_end(host: Host, unlearned: Lab) -> None:
    lab = unlearned
    served = Served(host, lab, KIND)
    lab.engine._prompts.begin()  # another model's run
    assert served.run() == (0, 0.0)
    lesson = served.session.lesson
    lab.wait_until(lambda: not lesson.is_pending)
    assert not served.session.graphs
    lab.engine._prompts.end(sampled=True)
    assert served.session.graphs
    served.settle()
    served.check()


def test_with_the_record_the_first_step_after_a_start_is_compiled(
    host: Host, again: Callable[..., Lab]
) -> None:
    lab = again()
    served = Served(host, lab, KIND, when_missing="wait")
    served.check(CALLS[1])
    assert lab.jobs() == 0


def test_without_the_record_one_step_is_watched_and_nothing_is_built(
    host: Host, unlearned: Lab
) -> None:
    """Whichever call is watched."""
    lab, jobs = unlearned, unlearned.jobs()
    served = Served(host, lab, KIND)
    assert served.run(CALLS[2]) == (0, 0.0) and served.reasons() == {"learned_soon"}
    served.settle()
    served.check()
    assert (lab.jobs() - jobs, lab.builds()) == (1, 0)


def test_a_fresh_process_learns_the_same_keys(host: Host, learned: Lab, tmp_path: Path) -> None:
    """And has the same name for what it learned of."""
    root = tmp_path / "fresh"
    learned.copy_to(root).engine.close()
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    arguments = (host.tree, host.base, root, KIND)
    told = {"timeout": 600, "environment": environment}
    shutil.rmtree(root / RECORDS)
    seen = seen_by("learned_child.py", *arguments, **told)
    assert (seen["jobs"], seen["builds"]) == (1, 0)
    assert seen["calls"] == [0, 0, 2] and max(seen["errors"]) <= TOLERANCE
    names = [{file.name for file in (each / RECORDS).iterdir()} for each in (root, learned.root)]
    assert names[0] == names[1] != set()


def test_who_waits_for_graphs_waits_for_what_is_learned(host: Host, unlearned: Lab) -> None:
    lab, jobs = unlearned, unlearned.jobs()
    served = Served(host, lab, KIND, when_missing="wait")
    assert served.run() == (0, 0.0)
    served.check()
    assert (lab.jobs() - jobs, lab.builds()) == (1, 0)


def test_a_model_that_cannot_be_looked_at_is_as_without(
    host: Host,
    again: Callable[..., Lab],
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    """Whatever it is made of, for it is nobody's that we know."""

    def fail(root: torch.nn.Module) -> str:
        raise TypeError("settings that nobody expected")

    lab = again()
    monkeypatch.setattr(learner, "structure_of", fail)
    served = Served(host, lab, KIND, when_missing="wait")
    for _ in range(2):
        assert served.run() == (0, 0.0)
    assert lab.jobs() == 0
    assert "settings that nobody expected" in served.report["text"]
    assert log.text.count("Traceback") == 1


def test_off_is_as_without(host: Host, again: Callable[..., Lab]) -> None:
    lab = again(learns=False)
    served = Served(host, lab, KIND)
    assert served.run() == (0, 0.0) and lab.jobs() == 0
    assert served.report["text"].startswith("this ErnieImageModel has no regions")


def test_switched_off_counts_from_the_next_run(host: Host, again: Callable[..., Lab]) -> None:
    lab = again()
    served = Served(host, lab, KIND, when_missing="wait")
    served.check()
    lab.settings.update({"learn_models": False})
    assert served.run() == (0, 0.0) and served.reasons() == {"learned_off"}
    lab.settings.update({"learn_models": True})
    served.check()


def test_a_workflows_folder_holds_what_was_learned(host: Host, again: Callable[..., Lab]) -> None:
    """It is all that Load Compiled Graph needs."""
    lab = again()
    served = Served(host, lab, KIND, when_missing="wait", graphs="portrait")
    served.check()
    lab.settle()
    folder = lab.workflows / "portrait.graphs"
    files = sorted(path.suffix for path in folder.iterdir() if path.is_file())
    assert files == [".json", ".learned", ".safetensors"]
    assert all(path.name.startswith(".") for path in folder.iterdir() if path.is_file())
    other = again(forgets=True)
    shutil.copytree(folder, other.workflows / folder.name)
    shutil.rmtree(other.store)
    loaded = Served(host, other, KIND)
    loaded.model = other.engine.load_graphs(loaded.plain, "portrait", strict=True)
    loaded.check()
    assert other.jobs() == 0


def test_loading_learns_nothing(host: Host, again: Callable[..., Lab]) -> None:
    lab = again(forgets=True)
    (lab.workflows / "portrait.graphs").mkdir()
    loaded = Served(host, lab, KIND, when_missing="never")
    assert loaded.run() == (0, 0.0) and loaded.reasons() == {"learned_nowhere"}
    assert lab.jobs() == 0


def test_a_lesson_that_was_cancelled_is_begun_anew(host: Host, unlearned: Lab) -> None:
    lab, jobs = unlearned, unlearned.jobs()
    lab.engine._builder.pause(True)
    served = Served(host, lab, KIND)
    served.run()
    assert lab.engine._builder.cancel() == 1
    assert served.run() == (0, 0.0)
    served.settle()
    served.check()
    assert (lab.jobs() - jobs, lab.builds()) == (2, 0)


def test_a_call_of_another_structure_is_compared_anew(
    host: Host, again: Callable[..., Lab]
) -> None:
    """Of a graph that was right each time before: what differs is never given on."""
    lab = again()
    served = Served(host, lab, KIND, when_missing="wait")
    served.check()
    [graph] = served.session.graphs
    good = call_instead(graph, lambda inputs: (1.01 * good(inputs)[0],))
    clone = served.model.clone()
    clone.model_options["transformer_options"]["of_another_structure"] = "yes"
    served.model = clone
    for _ in range(2):
        assert served.run() == (0, 0.0)  # the host's
    assert served.reasons() & {"differs", "once_more"}


@pytest.mark.parametrize(
    ("kind", "places"),
    [("stable_audio", 2), pytest.param("ace_step", 12, marks=pytest.mark.slow)],
)
def test_a_model_of_sound_is_served(host: Host, tmp_path: Path, kind: str, places: int) -> None:
    """Stable Audio's forward has no wrappers of the host around it; ACE-Step's blocks are called in
    four ways.
    """
    lab = Lab(tmp_path)
    try:
        served = Served(host, lab, kind)
        served.learn()
        jobs = lab.jobs()
        for sizes in CALLS:
            served.check(sizes, places)
        assert lab.jobs() == jobs and lab.builds() == jobs - 1
    finally:
        lab.engine.close()


def _under_another_nodes_attention(model: Any) -> Any:
    def attend(function: Any, *args: Any, **named: Any) -> Any:
        named.pop("transformer_options", None)
        return function(*args, **named)

    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = attend
    return clone


def test_a_step_with_another_nodes_code_is_not_watched(host: Host, unlearned: Lab) -> None:
    """It may keep something from one call to the next."""
    lab, jobs = unlearned, unlearned.jobs()
    served = Served(host, lab, KIND)
    plain = served.model
    served.model = _under_another_nodes_attention(plain)
    served.run()
    assert lab.jobs() == jobs and served.reasons() == {"learned_unseen"}
    served.model = plain
    served.run()
    served.settle()
    assert lab.jobs() == jobs + 1


def test_a_step_with_another_nodes_code_outside_its_blocks_is_served(
    host: Host, again: Callable[..., Lab]
) -> None:
    """Blocks of this model pass no options on: no node's attention is asked in them."""
    served = Served(host, again(), KIND, when_missing="wait")
    plain, theirs = served.model, _under_another_nodes_attention(served.model)
    patched = plain.clone()
    patched.set_model_patch(lambda given: given, "post_input")
    for model in (patched, theirs, plain):
        served.model = model
        served.check()
