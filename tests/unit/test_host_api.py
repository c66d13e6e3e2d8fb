"""The host's names that are not meant for others: one table, one room, and a look at start-up."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmgraph_backends.host_api import needs, present
from warmgraph_backends.host_api.needs import NEEDS, PRIVATE, Feature, Need
from warmgraph_tools.inprocess import Host

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ROOT / "backends"
#: What meets the host above the backends, by what it offers to all.
ABOVE = ("nodes", "console")
ROOM = "host_api"

#: What another room may name of the host all the same, and why.
EXCEPTIONS = {
    ("plans", "_forward"): "a form's reference is the host's own maths, and it lies there"
}
#: Rooms that import the host's modules, and why.
IMPORTS = {"families": "a plan tells the host's classes of blocks apart, which are its subject"}


def room(path: Path) -> str:
    """The room of a module; a module of the backends that stands in none is one."""
    folder, *parts = path.relative_to(ROOT).parts
    return parts[0] if folder == BACKENDS.name else folder


FOLDERS = [BACKENDS, *(ROOT / name for name in ABOVE)]
MODULES = [
    path for folder in FOLDERS for path in sorted(folder.rglob("*.py")) if room(path) != ROOM
]
TREES = {path: ast.parse(path.read_text("utf-8")) for path in MODULES}


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every attribute, keyword and plain text of a module, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.name, node.lineno) for alias in node.names)


def imports_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that a module imports from elsewhere, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or "", node.lineno


def is_hosts(module: str) -> bool:
    first = module.partition(".")[0]
    return first.startswith("comfy") or first in ("execution", "server", "folder_paths", "nodes")


# --- one room -------------------------------------------------------------------------------------


def test_no_private_name_of_the_host_is_used_outside_of_its_room() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in TREES.items()
        for name, line in names_in(tree)
        if name in PRIVATE and (room(path), name) not in EXCEPTIONS
    ]
    assert found == []


def test_the_host_is_imported_in_its_room_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path, tree in TREES.items()
        for module, line in imports_in(tree)
        if is_hosts(module) and room(path) not in (*IMPORTS, *ABOVE)
    ]
    assert found == []


def test_every_exception_is_still_one() -> None:
    used = {(room(path), name) for path, tree in TREES.items() for name, _ in names_in(tree)}
    assert set(EXCEPTIONS) <= used
    importing = {
        room(p) for p, t in TREES.items() for module, _ in imports_in(t) if is_hosts(module)
    }
    assert importing - set(ABOVE) == set(IMPORTS)


def test_the_room_imports_nothing_above_it() -> None:
    for path in sorted((BACKENDS / ROOM).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level > 1:
                below = ("contract", "errors", "device.gpu", "device.kinds", "reasons")
                assert node.module in below, f"{path.name} imports {node.module}"


def test_every_name_that_is_kept_to_the_room_is_used_in_it() -> None:
    texts = [p.read_text("utf-8") for p in (BACKENDS / ROOM).glob("*.py") if p.stem != "needs"]
    assert [name for name in sorted(PRIVATE) if not any(name in text for text in texts)] == []
    table = [f"{need.name} {' '.join(need.names)}" for need in NEEDS]
    gone = [name for name in needs._NOT_FOR_OTHERS if not any(name in line for line in table)]
    # The host sets these by a name that it puts together.
    assert sorted(gone) == ["bias_lowvram_function", "weight_lowvram_function"]


# --- the look at start-up -------------------------------------------------------------------------


def test_this_host_lacks_nothing(host: Host) -> None:
    assert present.missing() == {}
    homes = {need.name.partition(":")[0] for need in NEEDS}
    assert homes <= set(sys.modules), "else not all were looked at"


def test_it_takes_a_few_milliseconds_and_imports_nothing(host: Host) -> None:
    before = set(sys.modules)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        present.missing()
        took.append(time.perf_counter() - start)
    assert set(sys.modules) == before
    assert min(took) < 0.02


@pytest.mark.parametrize(
    ("need", "problem"),
    [
        (Need("comfy.ops:no_such", ()), "comfy.ops.no_such is not there"),
        (Need("comfy.ops:CastWeightBiasOp.no_such", ()), "CastWeightBiasOp.no_such is not there"),
        (Need("comfy.no_such_module:name", ()), "comfy.no_such_module is not there"),
        (Need("comfy.ops:uncast_bias_weight", (), "one, two"), "takes other arguments"),
        (Need("comfy.ops:cast_bias_weight", (), "layer, no_such="), "takes other arguments"),
        (Need("comfy.ops:cast_bias_weight", (), names=("_v", "_no_such")), "knows no _no_such"),
    ],
)
def test_what_is_missing_is_said_in_words(host: Host, need: Need, problem: str) -> None:
    found = present.missing([need._replace(features=(Feature.VAES,))])
    assert list(found) == [Feature.VAES] and problem in found[Feature.VAES]
    assert "off with this ComfyUI" in (present.why_off(found, Feature.VAES) or "")
    assert present.why_off(found, Feature.DEEPCACHE) is None


def test_a_host_that_lacks_something_for_everything_lacks_each_feature() -> None:
    off = {Feature.EVERYTHING: "comfy.ops is not there"}
    for feature in Feature:
        assert "comfy.ops is not there" in (present.why_off(off, feature) or "")


def test_the_log_says_once_what_is_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = {Feature.VAES: "one is not there", Feature.DEEPCACHE: "two is not there"}
    monkeypatch.setattr(present, "missing", lambda: off)
    assert present.look() == off and len(caplog.records) == 2
    caplog.clear()
    off[Feature.EVERYTHING] = "two is not there"
    assert present.look() == off
    [record] = caplog.records
    assert "everything" in record.getMessage() and "two is not there" in record.getMessage()


def test_code_of_another_pack_in_place_of_the_hosts_is_no_lack(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it names is not what the host names; it is judged by how it may be called."""
    import comfy.ops

    def around(*args: object, **kwargs: object) -> object:
        return theirs(*args, **kwargs)

    theirs = comfy.ops.cast_modules_with_vbar
    monkeypatch.setattr(comfy.ops, "cast_modules_with_vbar", around)
    assert present.missing() == {}


def test_a_module_that_the_host_has_for_later_is_no_lack(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "comfy.taesd.taesd")
    assert present.missing() == {}
    assert "comfy.taesd.taesd" not in sys.modules
