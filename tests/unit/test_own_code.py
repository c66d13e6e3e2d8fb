"""The fingerprint of our own code: what makes graphs is in it, how it is written down is not."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from warmgraph_backends.kinds.own_code import MAKERS, hash_files, own_fingerprint

BACKENDS = Path(__file__).resolve().parents[2] / "backends"
#: What a build imports besides, and why a graph is the same whatever it says. A folder stands for
#: all of its modules.
ELSEWHERE = {
    "families/": "what a form computes is hashed function by function into each kind's sources",
    "building/messages.py": "carries bytes from one process to the other",
    "storing/": "what files say of graphs, with format numbers of their own",
    "cleanup/": "folders and their owners",
    "compilers/eager.py": "has no graphs",
    "compilers/registry.py": "a list; the backend's name is part of the target",
    "compilers/self_test.py": "says why nothing compiles, after a build has failed",
    "contract.py": "words; what a description says is in the key itself",
    "errors.py": "words",
    "host_api/execution.py": "how errors pass and prompts end; a graph computes nothing of it",
    "host_api/formats.py": "what of a format a graph hangs on is in its description",
    "host_api/kitchen.py": "its version and backends are in the sources of each kind",
    "host_api/options.py": "names of what a call's options hold; no region takes options",
    "host_api/process.py": "imports the host as the server did; its code is in the key itself",
    "kinds/bytecode.py": "makes hashes that are part of the key",
    "kinds/instructions.py": "makes the target",
    "kinds/keys.py": "makes the key",
    "kinds/left_layers.py": "counts what graphs leave to the host, for reports",
    "kinds/options.py": "its values are in the target one by one",
    "kinds/own_code.py": "makes the fingerprint",
    "kinds/packs.py": "says whose code something is",
    "kinds/purity.py": "refuses kinds; changes none",
    "kinds/recorded.py": "keeps what others' code gave, where a server compares",
    "kinds/replaced.py": "says which files a worker runs; the key has what they leave behind",
    "kinds/sources.py": "makes hashes that are part of the key",
    "kinds/target.py": "makes the target",
    "kinds/tolerance.py": "compares with eager, as each first call does once more",
    "kinds/watch.py": "notices changes in a running server",
    "torch_api/cuda_source.py": "compiles and launches what operators run, when a graph calls them",
    "torch_api/device.py": "lets the GPU wait while kernels are timed",
    "torch_api/loading.py": "reads graphs; one that it cannot read is refused and built anew",
    "torch_api/payload.py": "reads graphs for people",
    "torch_api/present.py": "says whether anything can be built",
    "worker/notebook.py": "writes down what was built, for people",
    "worker/transplant.py": "the worker compares what it leaves behind with the key's sources",
}


def test_every_module_that_a_build_imports_is_in_it_or_left_out_for_a_reason() -> None:
    reached = imported("worker/build.py")
    assert {"torch_api/packing.py", "kernels/twin_product.py", "worker/export.py"} <= reached
    unknown = {name for name in reached if name not in MAKERS and not left_out(name)}
    assert not unknown, f"in neither list: {sorted(unknown)}"
    assert not [name for name in MAKERS if name not in reached or left_out(name)]
    assert not [part for part in ELSEWHERE if not any(name.startswith(part) for name in reached)]


def left_out(name: str) -> bool:
    return any(name == part or (part[-1] == "/" and name.startswith(part)) for part in ELSEWHERE)


def imported(start: str) -> set[str]:
    """The modules of `backends/` that one imports, directly or not, itself among them."""
    found: set[str] = set()
    pending = [start]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse((BACKENDS / name).read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.level:
                room = (BACKENDS / name).parents[node.level - 1]
                below = Path(room, *(node.module or "").split("."))
                files = [below.with_suffix(".py"), *(below / f"{a.name}.py" for a in node.names)]
                pending += [str(f.relative_to(BACKENDS).as_posix()) for f in files if f.is_file()]
    return found


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with the files that count, for a test to change."""
    for name in MAKERS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(BACKENDS / name, tmp_path / name)
    return tmp_path


def test_comments_docstrings_and_formatting_do_not_count(copied: Path) -> None:
    for name in MAKERS:
        path = copied / name
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            if documented and ast.get_docstring(node) is not None and len(node.body) > 1:
                node.body[0] = ast.Expr(ast.Constant("Another\nword."))
        written_anew = ast.unparse(ast.fix_missing_locations(tree))
        assert written_anew != path.read_text("utf-8")
        path.write_text(f"# A comment.\r\n{written_anew}  # Another.\r\n", "utf-8", newline="")
    assert hash_files(copied, MAKERS) == own_fingerprint()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("kernels/cross_attention.py", "* scale\n", "/ scale\n"),
        ("kernels/cross_attention.py", "_ROWS = 64", "_ROWS = 32"),
        ("kernels/cross_attention.py", "key_rows: tl.constexpr", "key_rows"),
        ("kernels/twin_product.py", "num_stages=_STAGES", "num_stages=_STAGES - 1"),
        ("compilers/rewrites.py", "correction=0", "correction=1"),
        ("torch_api/packing.py", "protocol=4", "protocol=5"),
        ("torch_api/lean_source.py", '"triton", ', ""),
        ("kinds/layout.py", "strides.insert(1, 1)", "strides.insert(1, 2)"),
    ],
)
def test_a_change_of_what_is_computed_or_packed_counts(
    copied: Path, name: str, before: str, after: str
) -> None:
    path = copied / name
    text = path.read_text("utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), "utf-8")
    assert hash_files(copied, MAKERS) != own_fingerprint()


def test_a_fingerprint_is_of_the_list_as_well(copied: Path) -> None:
    assert hash_files(copied, MAKERS[1:]) != own_fingerprint()
    first, second, *rest = MAKERS
    contents = [(copied / name).read_bytes() for name in (second, first)]
    for name, content in zip((first, second), contents, strict=True):
        (copied / name).write_bytes(content)
    assert hash_files(copied, (first, second, *rest)) != own_fingerprint()


_ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("own_code", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.own_fingerprint(), "torch" in sys.modules)
"""


def test_it_is_known_without_pytorch_and_the_same_in_another_process() -> None:
    file = BACKENDS / "kinds" / "own_code.py"
    command = [sys.executable, "-c", _ALONE, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [own_fingerprint(), "False"]
