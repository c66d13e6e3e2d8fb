"""The rooms of `backends/`: docs/architecture.md lists them from top to bottom, and imports point
downwards.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ROOT / "backends"
ALIAS = "warmgraph_backends"
MAX_LINES = 500


def _rooms() -> list[str]:
    """The rooms as docs/architecture.md lists them, the topmost first."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)/?` \|", table, flags=re.MULTILINE)


@functools.cache
def _tree(path: Path) -> ast.Module:
    """What a module says; `backends/` is read by most of these tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


def _modules() -> dict[str, Path]:
    """Every module below `backends/` by its dotted name."""
    found = {}
    for path in BACKENDS.rglob("*.py"):
        parts = path.relative_to(BACKENDS).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def _imported(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a module imports, wherever in it."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                yield whole if whole in modules else ".".join(base)


def test_every_room_is_listed_once() -> None:
    there = {path.stem for path in BACKENDS.iterdir() if path.name[0] not in "_."}
    assert sorted(_rooms()) == sorted(there)


def test_imports_point_downwards() -> None:
    rank = {room: place for place, room in enumerate(_rooms())}
    modules = _modules()
    upward = [
        f"{name} imports {other}"
        for name, path in modules.items()
        for other in _imported(name, path, modules)
        if name and other and rank[other.split(".")[0]] < rank[name.split(".")[0]]
    ]
    assert upward == []


def test_modules_of_a_room_import_one_another_in_no_circle() -> None:
    modules = _modules()
    imports = defaultdict(set)
    for name, path in modules.items():
        imports[name].update(_imported(name, path, modules))
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in imports[name] - {name}:
                visit(other, (*way, name))
            done.add(name)

    for name in modules:
        visit(name, ())


def test_backends_know_neither_nodes_nor_the_server() -> None:
    for name, path in _modules().items():
        for node in ast.walk(_tree(path)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names]
                names += [getattr(node, "module", None) or ""]
                heads = {each.split(".")[0] for each in names}
                assert not heads & {"nodes", "server", "aiohttp", "comfy_api"}, name


#: Where a sort of GPU may be named: the seam, CUDA graphs, CUDA and Triton source of ours, what
#: times them, and what only PyTorch itself may do with CUDA.
NAMES_GPUS = (
    *("device.", "cuda_graphs.", "kernels.", "choices.", "operators.head_rotation"),
    *("torch_api.cuda_", "several_cards."),
)
#: Constants that are names of something else: a target's fact, the toolkit's version.
OTHER_NAMES = {
    ("target.target", "cuda"),
    ("compilers.installed", "cuda"),
    ("compilers.installed", "hip"),
}


def _gpus_named(name: str, path: Path) -> Iterator[str]:
    """Where a module says what only `device` is to know: CUDA's half of PyTorch, what PyTorch was
    built for, and the types of devices.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        said = ""
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (owner == "torch" and node.attr in ("cuda", "xpu", "hip")) or (
                owner == "torch.version" and node.attr in ("cuda", "hip", "xpu")
            ):
                said = ast.unparse(node)
            elif node.attr in ("is_cuda", "is_xpu"):
                said = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = node.value.partition(":")[0]
            if kind in ("cuda", "xpu", "hip") and (name, node.value) not in OTHER_NAMES:
                said = repr(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None) or "", *(each.name for each in node.names)]
            said = next((each for each in modules if each.startswith("torch.cuda")), "")
        if said:
            yield f"{name}:{node.lineno} says {said}"


def test_sorts_of_gpus_are_named_in_one_room() -> None:
    """Another sort of card is a row of `device.kinds` and what `device.gpu` asks for it."""
    modules = _modules()
    found = {name: list(_gpus_named(name, path)) for name, path in modules.items()}
    assert found["device.gpu"] and found["cuda_graphs.driver"]  # else this sees nothing
    there = [said for name in found for said in found[name] if not name.startswith(NAMES_GPUS)]
    assert there == []
    console = {path.stem: path for path in (ROOT / "console").glob("*.py")}
    assert [said for name, path in console.items() for said in _gpus_named(name, path)] == []


def test_no_module_has_grown_beyond_one_idea() -> None:
    lines = {name: path.read_text("utf-8").count("\n") for name, path in _modules().items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_what_runs_on_gpus_alone_imports_names_that_are_there() -> None:
    """No other test on a machine without one would see that a name has moved."""
    modules = _modules()
    missing = []
    for folder in ("dev", "tests", "console"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(_tree(path)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ALIAS):
                    name = (node.module or "").removeprefix(ALIAS).lstrip(".")
                    there = _names(name, modules)
                    missing += [
                        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
                        for alias in node.names
                        if alias.name not in there
                    ]
    assert missing == []


def _names(module: str, modules: dict[str, Path]) -> set[str]:
    """What can be imported from a module of ours: its own names, and modules below it."""
    prefix = f"{module}." if module else ""
    found = {name[len(prefix) :].split(".")[0] for name in modules if name.startswith(prefix)}
    if module not in modules:
        return found
    for node in ast.walk(ast.parse(modules[module].read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return found
