"""What WARMGRAPH_DEBUG does to a model that runs: the wrong graph is found, and nothing changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from warmgraph_backends.debugging import Debugging
from warmgraph_tools.inprocess import Host

from .lab import TOLERANCE, Lab, call_instead
from .probed import Probed

VERIFY = Debugging(verify=True, captures=False)
RESBLOCKS = Debugging(only=("resblock",))
ERROR = 0.01


def spoil(graph: Any) -> list[bool]:
    """From its second call on, a graph's result is off by 1 %; returns what it was asked."""
    calls: list[bool] = []

    def wrong(arguments: list[Any]) -> list[torch.Tensor]:
        (result,) = right(arguments)
        calls.append(True)
        return [result if len(calls) == 1 else result * (1 + ERROR)]

    right = call_instead(graph, wrong)
    return calls


def kind_of(model: Probed, word: str) -> Any:
    """The kind with the most places whose label has this word."""
    kinds = model.model.get_attachment("warmgraph").scope.kinds
    return max((k for k in kinds if word in k.label), key=lambda kind: len(kind.places))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this pack warns of; the host warns of models that tests before this one left."""
    ours = [r for r in caplog.records if r.name.startswith("warmgraph")]
    return [r.getMessage() for r in ours if r.levelno >= logging.WARNING]


def reasons(model: Probed) -> dict[str, int]:
    return {entry["reason"]: entry["places"] for entry in model.report()["eager"]}


def test_verify_names_the_region_that_is_wrong_and_keeps_eagers_image(
    host: Host, make_lab: Callable[..., Lab], caplog: pytest.LogCaptureFixture
) -> None:
    model = Probed(make_lab(debugging=VERIFY), host, when_missing="never")
    model.lab.settle()
    kind = kind_of(model, "ResBlock")
    calls = spoil(kind.graph)
    caplog.clear()
    for _ in range(2):
        model.sample(steps=2)
        assert max(call.error for call in model.probe.calls) <= TOLERANCE
    assert len(calls) == 2 * 2 * len(kind.places)  # runs, steps
    warning, told = warnings(caplog)
    names = [place.name for place in kind.places]
    assert any(warning.startswith(f"Region {name} ({kind.label}) differs") for name in names)
    assert "by 1.0e-02 (relative L2, 1e-04 is allowed) at x 2x" in warning
    assert warning.endswith(f"eager's result is used. Its graph is {kind.graph.key}")
    (reason,) = reasons(model)
    assert reason.startswith("its compiled result differs from ComfyUI's, which is used")
    assert told == f"Warmgraph: parts of SDXL run at normal speed: {reason}"
    assert any(note.startswith("WARMGRAPH_DEBUG=verify is set") for note in model.report()["notes"])


def test_without_verify_the_wrong_graph_is_not_seen_after_its_first_comparison(
    host: Host, make_lab: Callable[..., Lab], caplog: pytest.LogCaptureFixture
) -> None:
    model = Probed(make_lab(), host, when_missing="never")
    model.lab.settle()
    spoil(kind_of(model, "ResBlock").graph)
    caplog.clear()
    model.sample(steps=2)
    assert max(call.error for call in model.probe.calls) > TOLERANCE
    assert warnings(caplog) == []


def test_verify_says_after_a_run_how_many_calls_were_right(
    host: Host, make_lab: Callable[..., Lab], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmgraph_backends")
    model = Probed(make_lab(debugging=VERIFY), host, when_missing="never")
    model.lab.settle()
    model.check()
    calls = model.report()["regions"]["total"] * len(model.probe.calls)
    (line,) = [line for line in caplog.messages if "verified" in line]
    assert line.startswith(
        f"Warmgraph: verified {calls} calls of regions with eager: none differs; nearest"
    )


def test_only_leaves_the_other_kinds_to_the_host_and_says_so(
    host: Host, make_lab: Callable[..., Lab]
) -> None:
    model = Probed(make_lab(debugging=RESBLOCKS), host, when_missing="never")
    model.lab.settle()
    model.sample()
    assert max(call.error for call in model.probe.calls) <= TOLERANCE
    report = model.report()
    states = {kind["kind"]: kind["state"] for kind in report["kinds"]}
    assert {state for label, state in states.items() if "ResBlock" in label} == {"ready"}
    assert {state for label, state in states.items() if "ResBlock" not in label} == {"eager"}
    places = sum(k["places"] for k in report["kinds"] if "ResBlock" not in k["kind"])
    assert reasons(model) == {"WARMGRAPH_DEBUG compiles resblock only": places}
    compiled = report["regions"]["total"] - places
    assert report["calls"]["compiled"] == compiled * len(model.probe.calls) > 0


@pytest.mark.slow
def test_dump_writes_down_what_was_built_and_what_was_loaded(
    host: Host, make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    folder = tmp_path / "private" / "debug"
    only = ("downsample", "upsample")
    lab = make_lab(without=("Downsample 64",), debugging=Debugging(dump=folder, only=only))
    model = Probed(lab, host)
    lab.settle()
    session = model.model.get_attachment("warmgraph")
    graphs = {kind.label: kind.graph for kind in session.scope.kinds if kind.graph is not None}
    sources = {graph.source for graph in graphs.values()}
    assert sources == {"built", "loaded"}
    assert len(list(folder.iterdir())) == len(graphs)
    for label, graph in graphs.items():
        (found,) = folder.glob(f"*-{graph.key[:12]}")
        texts = {path.name: path.read_text("utf-8") for path in found.iterdir()}
        built = {"exported.txt", "generated.py"} if graph.source == "built" else set()
        assert set(texts) == {"description.json", "source.py", "kernels.json", *built}
        description = json.loads(texts["description.json"])
        assert description["label"] == label
        assert description["sources"] == graph.description.sources
        compile(texts["source.py"], "source.py", "exec")
        assert "def call(" in texts["source.py"]
        kernels = json.loads(texts["kernels.json"])
        assert {kernel["sort"] for kernel in kernels} == {"C++"}
        assert all(kernel["name"] in texts["source.py"] for kernel in kernels)
        if built:
            assert "torch.ops.aten.conv2d" in texts["exported.txt"]
            assert "cpp_pybinding" in texts["generated.py"]  # kernels' text, which no file keeps
            assert "num_threads(" not in texts["generated.py"]  # as many as the server has
            assert "cpp_pybinding" not in texts["source.py"]
