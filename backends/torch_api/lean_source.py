"""Strip Inductor's Python of what a call does not need: kernel sources, benchmarks, asserts.

Kernel sources are for their compiler alone. The asserts check sizes, which our dispatch has checked
(`runtime.region`).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

_KERNEL_CALLS = {"triton", "cpp_pybinding"}
_ASSERTS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment")


def lean_source(source: str) -> tuple[str, list[str]]:
    """Return a generated module without these and unused imports, and its kernels' names."""
    tree = _WithoutAsserts().visit(ast.parse(source))
    body: list[ast.stmt] = []
    kernels: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and _is_kernel(node.value):
            assert isinstance(node.targets[0], ast.Name)
            kernels.append(node.targets[0].id)
        elif not _is_dispensable(node):
            body.append(node)
    tree.body = _used(body, {"call", "runner"})
    return ast.unparse(tree), kernels


class _WithoutAsserts(ast.NodeTransformer):
    """Replaces them by `pass`, as a block may hold nothing else."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        call = node.value
        is_assert = isinstance(call, ast.Call) and (
            isinstance(call.func, ast.Name) and call.func.id in _ASSERTS
        )
        return ast.Pass() if is_assert else node


def _is_kernel(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and isinstance(value.func.value, ast.Name)
        and value.func.value.id == "async_compile"
        and value.func.attr in _KERNEL_CALLS
    )


def _is_dispensable(node: ast.stmt) -> bool:
    text = ast.unparse(node) if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) else node.name
    return (
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or "async_compile" in text
        or "extern_kernels" in text
        or text in ("benchmark_compiled_module", "get_args")
        or isinstance(node, ast.If)
    )


def _used(body: Sequence[ast.stmt], wanted: set[str]) -> list[ast.stmt]:
    """Keep, from the end backwards, the top-level statements that `wanted` needs."""
    kept: list[ast.stmt] = []
    for node in reversed(body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [a for a in node.names if (a.asname or a.name).partition(".")[0] in wanted]
            if not node.names:
                continue
        elif isinstance(node, ast.Assign):
            defined = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            if not defined & wanted:
                continue
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in wanted:
            continue
        wanted |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        kept.append(node)
    return kept[::-1]
