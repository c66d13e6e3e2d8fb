"""The operators that generated code calls by name: most are of libraries that change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import GraphFileError
from ..reasons import of

_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)")


def schemas(source: str) -> dict[str, str]:
    """Return the operators of generated code, "library.operator.overload", and their schemas."""
    names = sorted({".".join(found) for found in _OPERATOR.findall(source)})
    return {name: _schema(name) for name in names}


def check(expected: Mapping[str, str]) -> None:
    """See that operators have the schemas that `schemas` returned.

    Raises:
        GraphFileError: one is missing or has another schema.
    """
    for name, schema in expected.items():
        if _schema(name) != schema:
            raise GraphFileError(of("operator_differs", name=name))


def _schema(name: str) -> str:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise GraphFileError(of("operator_gone", name=name))
    return str(found._schema)
