"""A fingerprint of our code that makes graphs, read without importing it or PyTorch.

Two graphs of one kind may differ because a kernel, a pass or the packing was fixed. So every key
holds a hash of the files that decide a graph for its device. Only their code counts: comments,
docstrings, line breaks and quotes may change, and modules may be moved and renamed.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

#: What decides the code of a graph, from the host's code on to the packed bytes; a test walks
#: through what a build imports, and says why each other module is not here.
MAKERS = (
    "compilers/lowering.py",
    "compilers/replacements.py",
    "compilers/rewrites.py",
    "host_api/activations.py",
    "host_api/attention.py",
    "host_api/layers.py",
    "operators/head_rotation.py",
    "operators/host_attention.py",
    "kernels/rounding.py",
    "operators/call_context.py",
    "operators/attention_layer.py",
    "plans/describe.py",
    "plans/region_code.py",
    "operators/host_layer.py",
    "kinds/layout.py",
    "operators/live_arguments.py",
    "operators/live_parts.py",
    "operators/registering.py",
    "operators/stand_in.py",
    "torch_api/compiling.py",
    "torch_api/kernel_names.py",
    "torch_api/lean_source.py",
    "torch_api/operators.py",
    "torch_api/packing.py",
    "torch_api/tracing.py",
    "torch_api/turns.py",
    "worker/build.py",
    "worker/checks.py",
    "worker/export.py",
    "worker/joined.py",
)
#: The same, of graphs for GPUs alone.
GPU_MAKERS = (
    "device/kinds.py",
    "kernels/group_moments.py",
    "kernels/int8_product.py",
    "kernels/norms.py",
    "kernels/products.py",
)

_BACKENDS = Path(__file__).resolve().parents[1]


@cache
def own_fingerprint(device: str) -> str:
    """Return 16 hex digits for what makes graphs for a device, read once in a process.

    Args:
        device: its type, as PyTorch names it.

    Raises:
        OSError: one of our files cannot be read.
    """
    return hash_files(_BACKENDS, makers(device))


def makers(device: str) -> tuple[str, ...]:
    """Return the files that decide what a graph for a device is."""
    return MAKERS if device == "cpu" else (*MAKERS, *GPU_MAKERS)


def hash_files(folder: Path, names: Iterable[str]) -> str:
    """Return 16 hex digits for the code of Python files, independent of their places and names.

    Args:
        folder: of all our modules, also those that are not named.
        names: of the files, relative to it.
    """
    digests = sorted(
        hashlib.sha256(_Meaning(folder, folder / name).text().encode()).hexdigest()
        for name in names
    )
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


class _Meaning:
    """A file's code, without positions and docstrings, without empty fields, in which Python's
    versions differ, and without the names of our modules.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._path = path
        self._tree = ast.parse(path.read_bytes())
        #: Names of our modules in this file, in the order of their use.
        self._modules: dict[str, str] = {}
        #: What else is imported from them, by the name there and here.
        self._imported: set[str] = set()
        for node in _statements(self._tree):
            if _is_from_ours(node):
                self._note(folder, node)

    def text(self) -> str:
        """Write it down."""
        return "\n".join((self._of(self._tree), *sorted(self._imported)))

    def _note(self, folder: Path, node: ast.ImportFrom) -> None:
        below = Path(self._path.parents[node.level - 1], *(node.module or "").split("."))
        for alias in node.names:
            name = alias.asname or alias.name
            if any(path.exists() for path in (below / alias.name, below / f"{alias.name}.py")):
                self._modules[name] = ""
            else:
                self._imported.add(f"{alias.name}={name}")

    def _of(self, node: ast.AST) -> str:
        parts = [type(node).__name__]
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                items = [self._part(item) for item in value if not _says_nothing(item)]
                if items:
                    parts.append(f"{name}=[{','.join(items)}]")
            elif value is not None:
                parts.append(f"{name}={self._part(value)}")
        return f"({' '.join(parts)})"

    def _part(self, value: object) -> str:
        if isinstance(value, ast.Name) and value.id in self._modules:
            if not self._modules[value.id]:
                count = sum(bool(given) for given in self._modules.values())
                self._modules[value.id] = f"<{count}>"
            return self._modules[value.id]
        return self._of(value) if isinstance(value, ast.AST) else repr(value)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node; expressions contain none."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()):
            yield each
            yield from _statements(each)


def _is_from_ours(node: object) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and node.level > 0


def _says_nothing(node: object) -> bool:
    """Whether a statement is a comment, or only imports one of our modules."""
    is_remark = (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    return is_remark or _is_from_ours(node)
