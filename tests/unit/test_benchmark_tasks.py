"""What benchmarks ask of an engine is there: most of them run on a GPU alone."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from dev.benchmarks.lab import Lab
from dev.benchmarks.tasks import TASKS
from warmgraph_backends.attaching.caches import Caches
from warmgraph_backends.engine import Engine

ROOT = Path(__file__).resolve().parents[2]


def _has(cls: type) -> set[str]:
    """Names of a class and of what its methods set on an instance."""
    tree = ast.parse(inspect.getsource(cls))
    own = {
        each.attr
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and ast.unparse(each.value) == "self"
    }
    return own | set(dir(cls))


def test_what_tasks_ask_of_an_engine_is_there() -> None:
    has = {"engine": _has(Engine), "engine.caches": _has(Caches)}
    asked = 0
    for path in sorted((ROOT / "dev" / "benchmarks" / "tasks").glob("*.py")):
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.Attribute) and (of := ast.unparse(each.value)) in has:
                asked += 1
                assert each.attr in has[of], f"{path.name}:{each.lineno}: {of}.{each.attr}"
    assert asked > 100


def test_what_is_run_is_a_task_and_takes_what_it_is_given() -> None:
    own, asked = set(inspect.signature(Lab.run).parameters), 0
    paths = [*(ROOT / "dev" / "benchmarks").glob("*.py"), *(ROOT / "tests" / "gpu").glob("*.py")]
    for path in sorted(paths):
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(each, ast.Call) and each.args):
                continue
            task, named = each.args[0], {word.arg for word in each.keywords}
            runs = ast.unparse(each.func).rpartition(".")[2] == "run"
            if not (runs and isinstance(task, ast.Constant) and "limit_s" in named):
                continue
            asked += 1
            where = f"{path.name}:{each.lineno}: {task.value}"
            assert task.value in TASKS, where
            taken = set(inspect.signature(TASKS[task.value]).parameters)
            assert named - {None} - own <= taken, where
    assert asked > 50
