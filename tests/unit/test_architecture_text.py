"""docs/architecture.md says what the code says: its tables of threads and locks, the names in it;
and it reads easily.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("backends", "nodes", "console")
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
#: Words that stand in code's letters, and are names of something else than ours.
OTHERS = frozenset(
    (
        *("KSampler", "DIFFUSION_MODEL", "APPLY_MODEL", "SAMPLER_SAMPLE", "PREDICT_NOISE"),
        *("MODEL", "VAE", "CONTROL_NET", "forward", "_forward", "decode", "encode", "__dict__"),
        *("finally", "…", "told=False", "supported_models"),
        *("torch.export", "torch.xpu", "tempfile.mkdtemp", "warmgraph::", "try"),
    )
)


@cache
def trees() -> dict[Path, ast.Module]:
    paths = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_column(table: str) -> str:
    return "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))


def locks() -> Iterator[str]:
    """`Class._name` of every lock that an object has, `module._name` of every other one."""
    for path, tree in trees().items():
        owners = {tree: path.stem}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                owners.update((inner, node.name) for inner in ast.walk(node))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
                made = node.value.func
                name = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", None)
                if name in LOCKS:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in targets:
                        bound = target.attr if isinstance(target, ast.Attribute) else target.id
                        yield f"{owners.get(node, path.stem)}.{bound}"


def test_the_table_of_locks_names_every_lock_and_no_other() -> None:
    table = section("Threads and locks").partition("| lock |")[2].partition("\n### ")[0]
    listed = re.findall(r"`([\w.]+)`", first_column("| lock |" + table))
    assert sorted(listed) == sorted(set(listed)), "one is listed twice"
    assert sorted(listed) == sorted(set(locks()))


def test_the_table_of_threads_names_every_thread_of_ours() -> None:
    listed = set(re.findall(r"`(warmgraph-[\w-]+)`", section("Threads and locks")))
    named: set[str] = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            called = getattr(node, "func", None)
            kind = getattr(called, "attr", getattr(called, "id", None))
            if isinstance(node, ast.Call) and kind in ("Thread", "ThreadPoolExecutor"):
                names = [k.value for k in node.keywords if k.arg in ("name", "thread_name_prefix")]
                assert names, f"{path.name}:{node.lineno}: a thread without a name"
                named.update(ast.literal_eval(name) for name in names)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                attributes = [getattr(target, "attr", None) for target in node.targets]
                named.update([str(node.value.value)] * ("name" in attributes))  # a Timer's
    assert listed == {name for name in named if name.startswith("warmgraph-")}


def names_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


@cache
def known() -> frozenset[str]:
    """Every name in our code, and of every module and folder of it."""
    found = {name for tree in trees().values() for name in names_of(tree)}
    for path in trees():
        found.update((path.stem, *path.relative_to(ROOT).parent.parts))
    return frozenset(found)


@cache
def names_in_tests() -> frozenset[str]:
    """Every name in capitals, and of a function, in tests and tools."""
    texts = (p.read_text("utf-8") for f in ("tests", "dev") for p in (ROOT / f).rglob("*.py"))
    return frozenset(re.findall(r"^(?:def )?(\w+)(?: =|: |\()", "\n".join(texts), flags=re.M))


QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.S))))


def is_known(quoted: str) -> bool:
    """Whether something in code's letters is a file, a name of our code, or of nobody's concern."""
    if quoted in OTHERS or "NAME" in quoted or quoted.startswith("warmgraph-"):
        return True
    if "/" in quoted or quoted.endswith((".py", ".md")):
        homes = ("", "backends/", "nodes/", "tests/*/")
        patterns = [f"{home}{quoted.rstrip('/')}{end}" for home in homes for end in ("", ".py")]
        return any(next(ROOT.glob(pattern), None) for pattern in patterns)
    parts = re.split(r"[.\s]", re.sub(r"\(.*?\)", "", quoted))
    return all(part in known() | OTHERS | names_in_tests() for part in parts)


def test_each_name_in_it_is_one_of_the_code() -> None:
    assert len(QUOTED) > 100
    assert [quoted for quoted in QUOTED if not is_known(quoted)] == []


#: Rooms whose modules are told by what they have in common.
ALIKE = {"families", "host_api", "torch_api"}


def test_the_list_of_rooms_names_every_module() -> None:
    rows = re.findall(r"^\| `(\w+)/?` \|.*\|(.*)\|$", section("Rooms"), flags=re.MULTILINE)
    texts = dict(rows)
    assert len(texts) == len(rows) > 20, "a room is listed twice"
    modules = {path for path in (ROOT / "backends").glob("*/*.py") if path.stem != "__init__"}
    unnamed = [
        f"{path.parent.name}/{path.stem}"
        for path in sorted(modules)
        if path.parent.name not in ALIKE and f"`{path.stem}`" not in texts[path.parent.name]
    ]
    assert unnamed == []


def sentences() -> list[str]:
    text = re.sub(r"```.*?```", "", TEXT, flags=re.S)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    text = re.sub(r"`[^`]*`", "X", "\n".join(lines))
    text = re.sub(r"^\s*(\d+\.|-)\s", "\n\n", text, flags=re.M)
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        found += re.split(r"(?<=[.:?])\**\s+(?=[A-Z*(])", " ".join(paragraph.split()))
    return [each for each in found if re.search(r"\w", each)]


def test_its_sentences_are_short() -> None:
    lengths = {each: len(re.findall(r"\w[\w'-]*", each)) for each in sentences()}
    assert len(lengths) > 100
    assert [each for each, length in lengths.items() if length > 35] == []
    assert statistics.mean(lengths.values()) <= 18
