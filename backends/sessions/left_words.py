"""How layers compute that no graph has, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..kinds.left_layers import Left

#: By `Left.how`.
_WORDS = {
    "unpacked": "quantised, {name}: this device unpacks it at each call{better}",
    "unpacked_asked": "quantised, {name}: unpacked at each call, for its file asks for full "
    "precision",
    "rounded": "quantised, {name}: multiplied as it is, by what is rounded within the graph",
    "multiplied": "quantised, {name}: multiplied as it is",
    "stored": "weights in fp8{better}",
    "stored_multiplied": "weights in fp8, multiplied as they are",
    "packed": "the weight is a {name}{better}",
    "plain": "plain weights in a quantised file",
    "others": "{name}",
}


def in_words(left: Mapping[Left, int]) -> Counter[tuple[str, str]]:
    """Count layers by what they are and how they compute, in words."""
    found: Counter[tuple[str, str]] = Counter()
    for each, count in left.items():
        better = _better(each.files)
        found[each.what, _WORDS[each.how].format(name=each.name, better=better)] += count
    return found


def _better(files: tuple[str, ...]) -> str:
    return f"; {' or '.join(files)} files are multiplied as they are" if files else ""
