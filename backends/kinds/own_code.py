"""A fingerprint of the code of ours that makes graphs: known without importing it, or PyTorch.

Two graphs of one kind may differ because a kernel, a pass or the packing was mended. So every key
holds a hash of the files that decide what a graph is. What they say counts, and not how it is
written down: comments, docstrings, line breaks and quotes may change as they like.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

#: What decides the code of a graph, from the host's code on to the packed bytes; a test walks
#: through what a build imports, and says why each other module is not here.
MAKERS = (
    "compilers/inductor.py",
    "compilers/rewrites.py",
    "host_api/activations.py",
    "host_api/attention.py",
    "host_api/layers.py",
    "kernels/attention.py",
    "kernels/cross_attention.py",
    "kernels/gpu_time.py",
    "kernels/head_rotation.py",
    "kernels/host_attention.py",
    "kernels/products.py",
    "kernels/twin_product.py",
    "kinds/attention_layer.py",
    "kinds/describe.py",
    "kinds/host_layer.py",
    "kinds/layout.py",
    "kinds/live_arguments.py",
    "kinds/live_parts.py",
    "kinds/operators.py",
    "kinds/stand_in.py",
    "torch_api/compiling.py",
    "torch_api/lean_source.py",
    "torch_api/operators.py",
    "torch_api/packing.py",
    "torch_api/tracing.py",
    "worker/build.py",
    "worker/export.py",
)

_BACKENDS = Path(__file__).resolve().parents[1]


@cache
def own_fingerprint() -> str:
    """Return 16 hex digits for what `MAKERS` say, read once in a process.

    Raises:
        OSError: a file of ours cannot be read.
    """
    return hash_files(_BACKENDS, MAKERS)


def hash_files(folder: Path, names: Iterable[str]) -> str:
    """Return 16 hex digits for what Python files say, and for their names."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\n{_meaning(ast.parse((folder / name).read_bytes()))}\n".encode())
    return digest.hexdigest()[:16]


def _meaning(node: ast.AST) -> str:
    """Write a syntax tree down without positions, texts that stand for themselves (docstrings) and
    empty fields, which Python's versions differ in.
    """
    parts = [type(node).__name__]
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            items = [_part(item) for item in value if not _is_remark(item)]
            if items:
                parts.append(f"{name}=[{','.join(items)}]")
        elif value is not None:
            parts.append(f"{name}={_part(value)}")
    return f"({' '.join(parts)})"


def _part(value: object) -> str:
    return _meaning(value) if isinstance(value, ast.AST) else repr(value)


def _is_remark(node: object) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
