"""The console's `learn`: a record in words, as a module's beginnings, and what has changed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.families import dit
from warmgraph_backends.learning.form import Learned
from warmgraph_backends.plans.binding import OPTIONS
from warmgraph_tools import small_transformers as transformers
from warmgraph_tools.inprocess import Host

from .console import run

#: What those who learn and those who describe both know.
LINES = (
    "comfy.ldm.flux.model:Flux: 4 of 4 blocks are learned, in 2 ways",
    "DoubleStreamBlock at double_blocks.0, double_blocks.1",
    "    takes     img [batch, img, 256]",
    "              pe [batch, 1, tokens, 64, 2, 2] (tokens is img + txt) float32",
    "    equal     attn_mask None",
    "    gives     img",
    "    writes    img",
    "    options   patches of other nodes: attn1_output_patch",
    "    attention the host's own when it runs, with the step's options",
    "    sizes     batch 1 to 64",
)


@pytest.fixture(scope="module")
def record(host: Host) -> Any:
    done = run("learn", "flux1", "--json", "--comfyui", host.tree)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_record_is_said_in_words(record: Any) -> None:
    from warmgraph_console.learned_words import words

    said = words(record)
    for line in LINES:
        assert line in said, said


def _family(record: Any) -> dict[str, Any]:
    """The names of a skeleton's module."""
    from warmgraph_console.learned_words import skeleton

    package = dit.__package__
    scope: dict[str, Any] = {"__name__": f"{package}.learned", "__package__": package}
    exec(compile(skeleton(record), "learned", "exec"), scope)  # noqa: S102
    return scope


def test_a_skeleton_is_a_module_with_the_forms_that_were_learned(host: Host, record: Any) -> None:
    scope = _family(record)
    root = transformers.make("flux1").diffusion_model
    plan = scope["plan_flux"](root)
    assert [place.name for place in plan.places] == [name for name, *_ in record["blocks"]]
    for place in plan.places:
        [[key, _]] = next(ways for name, _, ways in record["blocks"] if name == place.name)
        form = Learned(dict(record["ways"])[key])
        learned, found = (each.inputs(place.module, "float32") for each in (form, place.form))
        assert [(i.dtype, i.dims) for i in found] == [(i.dtype, i.dims) for i in learned]
        assert place.form.writes == form.writes


def test_a_skeleton_takes_its_inputs_in_their_order_and_cuts_each_block_once(host: Host) -> None:
    done = run("learn", "krea", "--json", "--comfyui", host.tree)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    plan = _family(record)["plan_krea2"](transformers.make("krea").diffusion_model)
    names = [place.name for place in plan.places]
    assert names and len(names) == len(set(names))
    for place in plan.places:
        inputs = place.form.inputs(place.module, "float32")
        taken = [name for name in place.form.arguments.uses if name != OPTIONS]
        assert [spec.name for spec in inputs] == taken
        assert {dim for spec in inputs for dim in spec.dims if isinstance(dim, str)} <= {
            *plan.symbols
        }


def test_a_skeleton_of_a_block_that_takes_no_options_and_of_nothing(record: Any) -> None:
    other = copy.deepcopy(record)
    for _, way in other["ways"]:
        way["attends"] = "traced"
    forms = _family(other)["FORMS"].values()
    assert forms and all(OPTIONS not in form.arguments.uses for form in forms)
    assert _family({**record, "ways": [], "blocks": []})["FORMS"] == {}


def test_what_is_learned_otherwise_is_said(record: Any) -> None:
    from warmgraph_console.learn import changes

    other = copy.deepcopy(record)
    [[_, way], *_] = other["ways"]
    way["attends"] = "traced"
    before = {"flux1": record, "gone": record, "broken": record, "same": record}
    after = {"flux1": other, "broken": {"refused": "it draws"}, "same": record, "new": record}
    found = "\n".join(changes(before, after))
    assert "gone: is not there any more" in found and "new: is new: comfy.ldm.flux" in found
    assert "    + nothing is learned: it draws" in found
    assert "    +     attention the host's own as it was traced" in found
    assert "same" not in found.partition("gone")[2].partition("new")[2]
    assert changes(before, before) == []


def test_a_file_is_learned_by_its_header(host: Host, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({n: w.contiguous() for n, w in transformers.weights("wan").items()}, path)
    done = run("learn", path, "--comfyui", host.tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "comfy.ldm.wan.model:WanModel: 2 of 2 blocks are learned" in done.stdout
    save_file({"weight": torch.ones(2, 2)}, path)
    done = run("learn", path, "--comfyui", host.tree)
    assert done.returncode == 2 and "knows no model of this kind" in done.stderr


def test_what_is_no_model_is_refused(host: Host, tmp_path: Path) -> None:
    assert run("learn").returncode == 2
    other = tmp_path / "model.gguf"
    other.write_bytes(b"GGUF" + bytes(64))
    done = run("learn", other, "--comfyui", host.tree)
    assert done.returncode == 2 and "must be a safetensors file" in done.stderr
    done = run("learn", "no_such", "--comfyui", host.tree)
    assert done.returncode == 2 and "flux1" in done.stderr and "no_such" in done.stderr


@pytest.mark.slow
def test_all_models_are_learned_as_before(host: Host, tmp_path: Path) -> None:
    done = run("learn", "--all", "--json", "--comfyui", host.tree)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "before.json"
    file.write_text(done.stdout.splitlines()[-1])
    again = run("learn", "--all", "--against", file, "--comfyui", host.tree)
    assert again.returncode == 0 and "nothing is learned otherwise" in again.stdout
