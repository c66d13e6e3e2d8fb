"""The GPU number in Python that Inductor generates.

Sources: torch/_inductor/codegen/{wrapper,cuda/device_op_overrides}.py of torch 2.10-2.15.
"""

from __future__ import annotations

import ast
import re

#: What is called with the number of a GPU.
_CALLS = ("get_raw_stream", "_DeviceGuard", "set_device", "synchronize")
_NAMED = re.compile(r"cuda:\d+")
#: All that may be such a number; a source with only the right one is not parsed.
_ANY = re.compile(rf"(?:{'|'.join(_CALLS)})\((\d+)|cuda:(\d+)|index=(\d+)|device\([^()]*, (\d+)\)")


def on_card(source: str, card: int) -> str:
    """Return a lean source for the GPU of this number, unchanged if it is already."""
    if not {"".join(groups) for groups in _ANY.findall(source)} - {str(card)}:
        return source
    return ast.unparse(_Numbers(card).visit(ast.parse(source)))


class _Numbers(ast.NodeTransformer):
    """Replaces the numbers of GPUs."""

    def __init__(self, card: int) -> None:
        self._card = card

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in _CALLS and node.args:
            node.args[0] = self._number(node.args[0])
        if name == "device":  # `device(type='cuda', index=0)`
            if len(node.args) > 1:
                node.args[1] = self._number(node.args[1])
            for each in node.keywords:
                if each.arg == "index":
                    each.value = self._number(each.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and _NAMED.fullmatch(node.value):
            return self._put(node, f"cuda:{self._card}")
        return node

    def _number(self, node: ast.expr) -> ast.expr:
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        return self._put(node, self._card) if is_number else node

    def _put(self, node: ast.expr, value: str | int) -> ast.Constant:
        return ast.copy_location(ast.Constant(value), node)
