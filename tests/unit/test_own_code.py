"""The fingerprint of our own code: what makes graphs is in it, how it is written down is not."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from warmgraph_backends.target.own_code import (
    GPU_MAKERS,
    MAKERS,
    hash_files,
    makers,
    own_fingerprint,
)
from warmgraph_tools.by_path import ADOPT

BACKENDS = Path(__file__).resolve().parents[2] / "backends"
#: What a build imports besides, and why a graph is the same whatever it says. A folder stands for
#: all of its modules.
ELSEWHERE = {
    "families/": "what a form computes is hashed function by function into each kind's sources",
    "learning/": "what a learned form computes is hashed, too; how it is called is its name",
    "torch_api/dicts.py": "says whether a block's attributes were set since its last call",
    "torch_api/fakes.py": "what a model is learned on; no build makes such",
    "torch_api/guarding.py": "what is learned of a model; records are of the code that made them",
    "torch_api/known_values.py": "likewise",
    "kernels/int8_sums.py": "is what a form computes, too",
    "kernels/packed_blocks.py": "is what forms compute, and name as their code",
    "plans/binding.py": "runs around a region in a server; no graph computes anything of it",
    "plans/family.py": "a record",
    "plans/pairs.py": "forms, as in families",
    "plans/symbols.py": "sizes of forms, which are in descriptions",
    "plans/plan.py": "what a form computes is hashed function by function, too",
    "plans/specs.py": "what it says of a kind is in the key itself",
    "building/messages.py": "carries bytes from one process to the other",
    "storing/": "what files say of graphs, with format numbers of their own",
    "cleanup/": "folders and their owners",
    "compilers/eager.py": "has no graphs",
    "compilers/inductor.py": "says what is needed, and who makes, loads and reads graphs",
    "compilers/registry.py": "a list; the backend's name is part of the target",
    "compilers/self_test.py": "says why nothing compiles, after a build has failed",
    "compilers/toolchain.py": "says what is needed; the versions themselves are in the target",
    "contract.py": "words; what a description says is in the key itself",
    "device/cards.py": "which sort of card is pretended is in the target",
    "device/gpu.py": "which GPU it is, and with which CUDA, is in the target",
    "errors.py": "words",
    "reasons.py": "words",
    "english.py": "words",
    "host_api/execution.py": "how errors pass and prompts end; a graph computes nothing of it",
    "host_api/formats.py": "what of a format a graph hangs on is in its description",
    "host_api/dynamic_vram.py": "where weights lie in a server",
    "host_api/gguf.py": "which class a layer counts as is in its description",
    "host_api/known_calls.py": "says whether a version of a layer is known",
    "host_api/needs.py": "says what is asked of a host",
    "host_api/present.py": "says whether it is there",
    "host_api/kitchen.py": "its version and backends are in the sources of each kind",
    "host_api/options.py": "names of what a call's options hold; no region takes options",
    "host_api/process.py": "imports the host as the server did; its code is in the key itself",
    "code/bytecode.py": "makes hashes that are part of the key",
    "target/instructions.py": "makes the target",
    "target/keys.py": "makes the key",
    "operators/left_layers.py": "counts what graphs leave to the host, for reports",
    "kinds/module_tree.py": "goes through descriptions, which are in the key",
    "target/compiler_options.py": "its values are in the target one by one",
    "target/own_code.py": "makes the fingerprint",
    "code/declared.py": "finds functions whose hashes are part of the key",
    "code/packs.py": "says whose code something is",
    "code/purity.py": "refuses kinds; changes none",
    "code/steady.py": "tells what may be captured; a worker captures nothing",
    "code/replaced.py": "says which files a worker runs; the key has what they leave behind",
    "code/sources.py": "makes hashes that are part of the key",
    "target/target.py": "makes the target",
    "kinds/tolerance.py": "compares with eager, as each first call does once more",
    "code/watch.py": "notices changes in a running server",
    "several_cards/generated.py": "has a loaded graph serve another GPU, which comparisons cover",
    "torch_api/cuda_source.py": "compiles and launches what operators run, when a graph calls them",
    "torch_api/cuda_pretended.py": "answers for a card that is not there; keys say for which",
    "torch_api/cuda_queue.py": "lets the GPU wait while kernels are timed",
    "torch_api/loading.py": "reads graphs; one that it cannot read is refused and built anew",
    "torch_api/payload.py": "reads graphs for people",
    "torch_api/present.py": "says whether anything can be built",
    "torch_api/version_files.py": "makes the target",
    "code/transplant.py": "the worker compares what it leaves behind with the key's sources",
}


ALL = makers("cuda")


def test_every_module_that_a_build_imports_is_in_it_or_left_out_for_a_reason() -> None:
    reached = imported("worker/build.py")
    assert {"torch_api/packing.py", "kernels/group_moments.py", "worker/export.py"} <= reached
    unknown = {name for name in reached if name not in ALL and not left_out(name)}
    assert not unknown, f"in neither list: {sorted(unknown)}"
    assert not [name for name in ALL if name not in reached or left_out(name)]
    assert not [part for part in ELSEWHERE if not any(name.startswith(part) for name in reached)]


def test_what_counts_for_gpus_alone_is_imported_by_nothing_that_others_go_through() -> None:
    """But for a plain table: a build for a processor can run none of it."""
    reached = imported("worker/build.py", always=True) | imported(
        "compilers/lowering.py", always=True
    )
    assert set(MAKERS) <= reached
    assert reached & set(GPU_MAKERS) == {"device/kinds.py"}
    assert not set(MAKERS) & set(GPU_MAKERS)


def left_out(name: str) -> bool:
    return any(name == part or (part[-1] == "/" and name.startswith(part)) for part in ELSEWHERE)


def imported(start: str, *, always: bool = False) -> set[str]:
    """The modules of `backends/` that one imports, directly or not, itself among them.

    Args:
        always: those that are imported with it, and not by what a function does.
    """
    found: set[str] = set()
    pending = [start]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        tree = ast.parse((BACKENDS / name).read_bytes())
        for node in tree.body if always else ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                room = (BACKENDS / name).parents[node.level - 1]
                below = Path(room, *(node.module or "").split("."))
                files = [below.with_suffix(".py"), *(below / f"{a.name}.py" for a in node.names)]
                pending += [str(f.relative_to(BACKENDS).as_posix()) for f in files if f.is_file()]
    return found


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with our modules, for a test to change."""
    folder = tmp_path / "backends"
    shutil.copytree(BACKENDS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_comments_docstrings_and_formatting_do_not_count(copied: Path) -> None:
    for name in ALL:
        path = copied / name
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            if documented and ast.get_docstring(node) is not None and len(node.body) > 1:
                node.body[0] = ast.Expr(ast.Constant("Another\nword."))
        written_anew = ast.unparse(ast.fix_missing_locations(tree))
        assert written_anew != path.read_text("utf-8")
        path.write_text(f"# A comment.\r\n{written_anew}  # Another.\r\n", "utf-8", newline="")
    assert hash_files(copied, ALL) == own_fingerprint("cuda")


def move(folder: Path, old: str, new: str, changes: dict[str, str]) -> None:
    """Move a module into a new room, and change what other modules, and itself, say of where things
    are: patterns, and what stands in their places.
    """
    (folder / new).parent.mkdir()
    (folder / old).rename(folder / new)
    room = Path(old).parent.name
    text = (folder / new).read_text("utf-8")
    text = re.sub(r"from \. import", f"from ..{room} import", text)
    (folder / new).write_text(re.sub(r"from \.(?=\w)", f"from ..{room}.", text), "utf-8")
    for path in folder.rglob("*.py"):
        text = path.read_text("utf-8")
        for pattern, instead in changes.items():
            text = re.sub(pattern, instead, text)
        path.write_text(text, "utf-8")


def test_modules_may_be_moved_and_renamed(copied: Path) -> None:
    """One that others take functions of, and one that they call by its own name."""
    move(
        copied,
        "kinds/layout.py",
        "shapes/order.py",
        {
            r"\.\.kinds\.layout import": "..shapes.order import",
            r"(?<=from )\.layout\b": "..shapes.order",
        },
    )
    move(
        copied,
        "operators/host_attention.py",
        "calls/attending.py",
        {
            r"from \.\.operators import host_attention\n": "from ..calls import attending\n",
            r"from \.\.operators import host_attention, host_layer": (
                "from ..calls import attending\nfrom ..operators import host_layer"
            ),
            r"\bhost_attention\.(?=\w)": "attending.",
        },
    )
    assert "from ..shapes.order import" in (copied / "worker/export.py").read_text("utf-8")
    assert "attending.OPERATOR" in (copied / "worker/export.py").read_text("utf-8")
    there = {
        "kinds/layout.py": "shapes/order.py",
        "operators/host_attention.py": "calls/attending.py",
    }
    assert not [name for name in there if (copied / name).exists()]
    assert hash_files(copied, (there.get(name, name) for name in ALL)) == own_fingerprint("cuda")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("kernels/group_moments.py", "mean += step * share", "mean -= step * share"),
        ("kernels/group_moments.py", "_ROWS = 128", "_ROWS = 64"),
        ("kernels/group_moments.py", "width: tl.constexpr", "width"),
        ("kernels/int8_product.py", "Tile(128, 256, 64, 8, 4)", "Tile(128, 256, 64, 8, 3)"),
        ("kernels/norms.py", "_SIDES = (2, 3)", "_SIDES = (3, 2)"),
        ("compilers/replacements.py", "correction=0", "correction=1"),
        ("torch_api/packing.py", "protocol=4", "protocol=5"),
        ("torch_api/lean_source.py", '"triton", ', ""),
        ("kinds/layout.py", "strides.insert(1, 1)", "strides.insert(1, 2)"),
        (
            "worker/export.py",
            "    fake_mode,\n",
            "    realized as fake_mode,\n",
        ),
        ("torch_api/packing.py", "import pickle\n", "import marshal as pickle\n"),
    ],
)
def test_a_change_of_what_is_computed_or_packed_counts(
    copied: Path, name: str, before: str, after: str
) -> None:
    path = copied / name
    text = path.read_text("utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), "utf-8")
    assert hash_files(copied, ALL) != own_fingerprint("cuda")
    is_unchanged = hash_files(copied, MAKERS) == own_fingerprint("cpu")
    assert is_unchanged is (name in GPU_MAKERS)


def test_a_fingerprint_is_of_the_list_as_well() -> None:
    for device in ("cpu", "cuda"):
        assert hash_files(BACKENDS, makers(device)) == own_fingerprint(device)
        assert hash_files(BACKENDS, makers(device)[1:]) != own_fingerprint(device)
    assert own_fingerprint("cpu") != own_fingerprint("cuda")
    assert own_fingerprint("xpu") == own_fingerprint("cuda")


_ALONE = """
from warmgraph_backends.target.own_code import own_fingerprint
print(own_fingerprint("cpu"), "torch" in sys.modules)
"""


def test_it_is_known_without_pytorch_and_the_same_in_another_process() -> None:
    command = [sys.executable, "-c", ADOPT + _ALONE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [own_fingerprint("cpu"), "False"]
