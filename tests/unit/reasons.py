"""Every text of the backends that may reach a user as a reason, read from their sources.

A reason is born as a literal somewhere: returned, raised as one of our errors, noted, put into a
table. Which literals become reasons cannot be told by their place alone, so this takes the other
way: every text of two words and more counts, but for those whose place says that they are none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BACKENDS = Path(__file__).resolve().parents[2] / "backends"
#: What stands for a part of a text that differs from case to case.
HOLE = "…"

#: Errors whose text people read as it is; the text of any other is a part of another text.
_TOLD = re.compile(
    r"(Requirement|Description|Build|GraphFile|RefusedFile|GraphsName|Strict|Capture|FixedCall|Own)"
    r"Error"
)
#: Calls whose texts are no reasons: patterns, and what is looked for in a text.
_NO_REASONS = {
    *("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"),
    *("split", "replace", "strip", "compile", "fullmatch", "match", "findall", "register"),
    "spare",  # what was being done: its words are in "... failed (...)"
}


class Text(NamedTuple):
    """A literal: its words with holes, and where it is."""

    words: str
    place: str


def texts(folder: Path = BACKENDS) -> Iterator[Text]:
    """Yield every text that may be a reason, of all modules below a folder."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder.parent).as_posix()
        for node in _literals(ast.parse(path.read_text("utf-8"))):
            words = _words(node)
            count = len(re.findall(r"[A-Za-z][a-z']+", words))
            if " " in words and count > (HOLE not in words):
                yield Text(words, f"{name}:{node.lineno}")


def _literals(tree: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    if isinstance(tree, ast.JoinedStr):
        yield tree
        for value in tree.values:
            if isinstance(value, ast.FormattedValue):
                yield from _literals(value.value)
    elif isinstance(tree, ast.Constant):
        if isinstance(tree.value, str):
            yield tree
    elif not _is_none(tree):
        for name, field in ast.iter_fields(tree):
            if isinstance(tree, ast.Dict) and name == "keys":
                continue
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from _literals(child)


def _is_none(node: ast.AST) -> bool:
    """Whether nothing within can be a reason."""
    if isinstance(node, ast.Expr):  # a docstring
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.FunctionDef):  # what people call a sort of region
        return node.name == "label"
    if isinstance(node, ast.Raise):
        called = node.exc.func if isinstance(node.exc, ast.Call) else None
        return (
            isinstance(called, ast.Name) and called.id[0].isupper() and not _TOLD.match(called.id)
        )
    if isinstance(node, ast.keyword):
        return node.arg in ("remedy", "title")
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id.endswith("REMEDY") for t in node.targets)
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = function.value
            if isinstance(owner, ast.Name) and owner.id in ("logger", "io"):
                return True
            return function.attr in _NO_REASONS
    return isinstance(node, (ast.Assert, ast.Compare))


def _words(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return holed(str(node.value))
    return holed(
        "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    )


def holed(text: str) -> str:
    """Return the words of a text, which may be a template for `format`, with holes."""
    text = re.sub(r"\{[^}]*\}", HOLE, text)
    return " ".join(text.replace("`", "").split()).strip(" ;,:")
