"""`cli.py prebuild`: what workflows need is compiled before anybody is served, and then a server
that cannot compile serves it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from warmgraph_backends.storing.graph_file import read_header
from warmgraph_tools import templates
from warmgraph_tools.by_path import ROOT, load
from warmgraph_tools.host import Graph, Server
from warmgraph_tools.install import prepare_base

STORE = Path("models", "compiled_graphs")
#: What the shipped workflow asks for.
CHECKPOINT = "sd_xl_base_1.0.safetensors"
#: Of a narrow SDXL.
PARTS = 8
UNPRIVILEGED = Path(__file__).with_name("unprivileged.py")


class Done(NamedTuple):
    """How a call ended: its status, what it said, and the same for machines."""

    status: int
    said: str
    whole: dict[str, Any]

    def of(self, name: str) -> dict[str, Any]:
        (result,) = (each for each in self.whole["workflows"] if each["name"].endswith(name))
        return dict(result)


def prebuild(server: Server, *wanted: object, environment: dict[str, str] | None = None) -> Done:
    """Run the command of the installed pack; the store is in a folder of its own."""
    pack, out = server.base / "custom_nodes" / "warmgraph", server.base / "prebuilt.json"
    command = [sys.executable, str(pack / "cli.py"), "prebuild", *map(str, wanted)]
    command += ["--store", str(server.base / "image"), "--json", str(out)]
    command += ["--comfyui", str(server.tree), "--base-directory", str(server.base)]
    command += [] if "--target" in wanted else ["--", "--cpu"]
    environment = {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert out.is_file(), done.stdout + done.stderr
    return Done(done.returncode, done.stdout, json.loads(out.read_text("utf-8")))


def api_prompt(checkpoint: str, **compile_inputs: Any) -> Graph:
    """A prompt as the page exports it, with a sampler, a picture and two Compile nodes."""
    inputs = {"model": ["1", 0], "when_missing": "background", **compile_inputs}
    sampling = {"seed": 1, "steps": 1, "cfg": 7.0, "sampler_name": "euler", "denoise": 1.0}
    return {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": checkpoint}},
        "2": {"class_type": "WarmgraphCompileModel", "inputs": inputs},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a cat"}},
        "4": {
            "class_type": "EmptyLatentImage",
            "inputs": {"width": 64, "height": 64, "batch_size": 1},
        },
        "5": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["2", 0],
                "positive": ["3", 0],
                "negative": ["3", 0],
                "latent_image": ["4", 0],
                "scheduler": "normal",
                **sampling,
            },
        },
        "6": {
            "class_type": "WarmgraphGraphReport",
            "inputs": {"model": ["2", 0], "after": ["5", 0]},
        },
    }


def nested_workflow(checkpoint: str) -> dict[str, Any]:
    """A saved workflow whose loader is in a subgraph of a subgraph, its file chosen on the outer
    one, and whose node that compiles is in the outer one; behind it a node that nobody knows.
    """
    chosen = {"name": "ckpt_name", "type": "COMBO", "widget": {"name": "ckpt_name"}}
    model = {"name": "model", "type": "MODEL", "link": 1}
    loader = {
        "id": 1,
        "type": "CheckpointLoaderSimple",
        "inputs": [{**chosen, "link": 2}],
        "widgets_values": ["not-this-one.safetensors"],
    }
    compiles = {
        "id": 2,
        "type": "WarmgraphCompileModel",
        "inputs": [model],
        "widgets_values": ["background", "", "auto", "auto"],
    }
    into = {"id": 2, "origin_id": -10, "origin_slot": 0, "target_id": 1, "target_slot": 0}
    out = {"id": 1, "origin_id": 1, "origin_slot": 0, "target_id": -20, "target_slot": 0}
    inputs = [{"name": "ckpt_name", "linkIds": [2]}]
    inner = {
        "id": "INNER",
        "name": "Load",
        "nodes": [loader],
        "links": [out, into],
        "inputs": inputs,
        "outputs": [{"linkIds": [1]}],
    }
    outer = {
        "id": "OUTER",
        "name": "Load and compile",
        "nodes": [
            {"id": 1, "type": "INNER", "inputs": [{**chosen, "link": 2}], "widgets_values": []},
            compiles,
        ],
        "links": [{**out, "target_id": 2}, into, {**out, "id": 3, "origin_id": 2}],
        "inputs": inputs,
        "outputs": [{"linkIds": [3]}],
    }
    unknown = {"id": 6, "type": "NobodyKnowsThis", "inputs": [model]}
    node = {"id": 5, "type": "OUTER", "inputs": [{**chosen, "link": None}]}
    return {
        "nodes": [{**node, "widgets_values": [checkpoint]}, unknown],
        "links": [[1, 5, 0, 6, 0, "MODEL"]],
        "definitions": {"subgraphs": [outer, inner]},
    }


@pytest.fixture(scope="module")
def folders(
    host_tree: Path,
    built_once: Any,
    place_model: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Server:
    """The folders of a server that never ran; what this run of the suite has built of a narrow
    SDXL is in the store that is filled, but for one part.
    """
    base = prepare_base(tmp_path_factory.mktemp("image"), host_tree)
    built_once.lend(base, without=1)
    (base / STORE).mkdir(exist_ok=True)
    (base / STORE).rename(base / "image")
    server = Server(host_tree, base)
    place_model(server, "narrowxl", name=CHECKPOINT)
    return server


def saved(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, "utf-8")
    return path


@pytest.fixture(scope="module")
def first(folders: Server, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Good and bad ones in one call."""
    folder = tmp_path_factory.mktemp("workflows")
    bypassed = templates.read("text_to_image")
    for node in bypassed["nodes"]:
        if node["type"] == "WarmgraphCompileModel":
            node["mode"] = 4
    unknown = api_prompt(CHECKPOINT)
    unknown["1"]["class_type"] = "LoaderOfAnotherPack"
    return prebuild(
        folders,
        folder / "gone.json",
        saved(folder, "broken.json", "{"),
        saved(folder, "list.json", [1]),
        saved(folder, "bypassed.json", bypassed),
        saved(folder, "loads.json", templates.read("load_compiled_graph")),
        saved(folder, "unknown.json", unknown),
        saved(folder, "no_file.json", api_prompt("gone.safetensors")),
        saved(folder, "exact.json", api_prompt(CHECKPOINT, form="exact")),
        saved(folder, "shipped.json", templates.read("text_to_image")),
        saved(folder, "nested.json", nested_workflow(CHECKPOINT)),
        saved(folder, "api.json", api_prompt(CHECKPOINT)),
        "--checkpoint",
        "never heard of",
    )


def test_what_is_missing_is_built_and_kept_and_the_table_says_so(
    first: Done, folders: Server
) -> None:
    (model,) = first.of("shipped.json")["models"]
    assert model["ok"] and len(model["parts"]) == PARTS
    assert {part["state"] for part in model["parts"]} <= {"loaded", "built"}
    assert first.whole["builds"] >= 1 and first.whole["builds"] + first.whole["loads"] == PARTS
    built = [part for part in model["parts"] if part["state"] == "built"]
    assert len(built) == first.whole["builds"] and all(part["seconds"] > 0 for part in built)
    for part in model["parts"]:
        assert (folders.base / "image" / f"{part['key']}.safetensors").is_file()
        assert f"    {part['state']:8} {part['key'][:12]} {part['part']}" in first.said
    assert not list((folders.base / STORE).glob("*.safetensors"))
    assert first.whole["store"] == str(folders.base / "image")


def test_saved_subgraphs_and_prompts_for_the_api_need_the_same_parts(first: Done) -> None:
    keys = [
        {part["key"] for part in first.of(name)["models"][0]["parts"]}
        for name in ("shipped.json", "nested.json", "api.json")
    ]
    assert keys[0] == keys[1] == keys[2] and len(keys[0]) == PARTS
    assert first.of("nested.json")["models"][0]["node"] == "5:2"
    assert all(first.of(name)["ok"] for name in ("shipped.json", "nested.json", "api.json"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.json", "it cannot be read: No such file or directory"),
        ("broken.json", "it is no workflow (Expecting property name"),
        ("list.json", "it is no workflow; save it with"),
        ("bypassed.json", "no node in it compiles; put Compile Model before the sampler"),
        ("loads.json", "Load Compiled Graph compiles nothing"),
        ("unknown.json", "no node class LoaderOfAnotherPack; install the pack"),
        ("no_file.json", "there is no ckpt_name 'gone.safetensors' for node 1 "),
        ("never heard of", f"there are: {CHECKPOINT}"),
    ],
)
def test_what_cannot_be_built_for_is_told_and_the_others_are_done(
    first: Done, name: str, words: str
) -> None:
    result = first.of(name)
    assert not result["ok"] and words in result["error"]
    (line,) = (line for line in first.said.splitlines() if f"{name}: FAILED: " in line)
    assert words in line
    assert first.status == 1 and not first.whole["ok"]


def test_a_node_that_is_set_to_compile_nothing_is_no_failure(first: Done) -> None:
    result = first.of("exact.json")
    assert result["ok"] and result["models"][0]["parts"] == []
    assert "is set to compile nothing" in first.said
    assert "4 of 12 ready: " in first.said


@pytest.fixture(scope="module")
def no_compiler(first: Done, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process sees in an image without compilers, as a user without a folder of its own."""
    empty = tmp_path_factory.mktemp("empty")
    return {"PATH": str(empty), "CC": "", "CXX": "", "HOME": str(empty / "gone")}


def test_a_second_call_loads_all_and_needs_no_compiler(
    first: Done, folders: Server, no_compiler: dict[str, str]
) -> None:
    again = prebuild(folders, "--checkpoint", CHECKPOINT, environment=no_compiler)
    assert (again.status, again.whole["builds"], again.whole["loads"]) == (0, 0, PARTS), again.said
    assert f"1 of 1 ready: {PARTS} parts loaded, 0 built, 0 failed, in " in again.said
    assert again.whole["seconds"] > 0


@pytest.fixture
def image(first: Done, folders: Server, tmp_path: Path) -> Iterator[Path]:
    """A base directory as an image has it: the folder of the store and the key are copied, and no
    more. The key can only be read; models are another user's, and nothing can be written there.
    """
    base = prepare_base(tmp_path, folders.tree)
    shutil.copytree(folders.base / "image", base / STORE)
    key = Path("user", "__warmgraph", "signing.key")
    (base / key.parent).mkdir(parents=True, exist_ok=True)
    shutil.copy2(folders.base / key, base / key)
    (base / key).chmod(0o400)
    checkpoint = base / "models" / "checkpoints" / CHECKPOINT
    checkpoint.parent.mkdir(exist_ok=True)
    os.link(folders.base / checkpoint.relative_to(base), checkpoint)
    closed = [each for each in base.glob("models/**") if each.is_dir()]
    for each in closed:
        each.chmod(0o555)
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            os.chown(each, 65534, 65534)
    yield base
    for each in closed:
        each.chmod(0o755)


def test_a_server_in_an_image_without_a_compiler_serves_all_of_it_and_builds_nothing(
    image: Path, folders: Server, no_compiler: dict[str, str]
) -> None:
    before, new = (str(UNPRIVILEGED),), str(image / STORE / "new")
    writing = [sys.executable, *before, "-c", "import sys; open(sys.argv[1], 'w')", new]
    if subprocess.run(writing, capture_output=True).returncode == 0:
        pytest.skip("whoever runs this may write everywhere")
    with Server(folders.tree, image, environment=no_compiler, before=before) as server:
        run = server.run(api_prompt(CHECKPOINT, when_missing="wait"))
        (report,) = server.model_reports(run)
        told = server.report()
    assert report["regions"] == {"total": 38, "compiled": 38, "eager": 0}
    assert (report["builds"], report["loads"], report["calls"]["eager"]) == (0, PARTS, 0)
    assert [w["id"] for w in told["warnings"]] == ["missing C++ compiler"]
    warned = [line for line in server.log.splitlines() if "WARNING" in line]
    assert len([line for line in warned if "ompile" in line or "Warmgraph" in line]) == 1, warned


def test_a_call_without_anything_to_build_or_without_comfyui_is_refused(tmp_path: Path) -> None:
    for arguments, words in (
        ([], "prebuild takes a WORKFLOW, or --checkpoint NAME"),
        (["x.json", "--comfyui", str(tmp_path)], "there is no ComfyUI in "),
    ):
        command = [sys.executable, str(ROOT / "cli.py"), "prebuild", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and words in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")
def test_a_call_that_is_told_to_end_while_comfyui_starts_leaves_no_server(folders: Server) -> None:
    """As `docker stop` does it, and Ctrl+C."""
    command = [sys.executable, str(ROOT / "cli.py"), "prebuild", "--checkpoint", CHECKPOINT]
    command += ["--comfyui", str(folders.tree), "--base-directory", str(folders.base), "--"]
    with subprocess.Popen([*command, "--cpu"], stdout=subprocess.PIPE, text=True) as called:
        assert called.stdout is not None and "starting ComfyUI" in called.stdout.readline()
        deadline = time.monotonic() + 60
        while not (started := psutil.Process(called.pid).children(recursive=True)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        called.terminate()
        assert called.wait(60) == 130
    _, left = psutil.wait_procs(started, timeout=30)
    assert left == []


@pytest.mark.slow
def test_a_whole_model_is_compiled_for_a_card_that_is_not_there(folders: Server) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, which torch for CPUs does not bring")
    done = prebuild(folders, "--checkpoint", CHECKPOINT, "--target", "sm_90")
    assert done.status == 0 and ", as on an NVIDIA H100 (sm_90, 80 GiB)" in done.said, done.said
    assert (done.whole["builds"], done.whole["target"]) == (PARTS, "sm_90")
    (model,) = done.of(CHECKPOINT)["models"]
    for part in model["parts"]:
        manifest = read_header(folders.base / "image" / f"{part['key']}.safetensors").read()
        assert manifest.target["capability"] == "9.0" and manifest.facts.checks == []
    again = prebuild(folders, "--checkpoint", CHECKPOINT, "--target", "sm_90")
    assert (again.status, again.whole["builds"], again.whole["loads"]) == (0, 0, PARTS)


def test_the_commands_of_the_page_for_hosts_are_understood() -> None:
    page = (ROOT / "docs" / "hosting.md").read_text("utf-8").replace("\\\n", " ")
    calls = re.findall(r"^.*cli\.py (prebuild .+)$", page, re.MULTILINE)
    assert len(calls) >= 5
    for call in calls:
        words = shlex.split(call)
        options = load("warmgraph_cli", ROOT / "cli.py").parsed(words)
        assert options.workflows or options.checkpoint
        assert bool(options.flags) == ("--" in words)
