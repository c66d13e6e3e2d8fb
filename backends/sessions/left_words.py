"""How the layers outside of graphs compute, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..operators.left_layers import LeftLayers
from ..reasons import Reason, joined, of

#: By `LeftLayers.how`.
_PRODUCTS = {
    "unpacked": "unpacked_here",
    "unpacked_asked": "unpacked_fully",
    "rounded": "multiplied_rounded",
    "multiplied": "multiplied",
    "in_blocks": "unpacked_by_us",
}
_OTHERS = {
    "stored": "fp8_weights",
    "stored_multiplied": "fp8_multiplied",
    "packed": "weight_is",
    "plain": "plain_weights",
}


def in_words(left: Mapping[LeftLayers, int]) -> Counter[tuple[str, Reason]]:
    """Count layers by sort and by how they compute, in words."""
    found: Counter[tuple[str, Reason]] = Counter()
    for each, count in left.items():
        found[each.what, _why(each)] += count
    return found


def _why(left: LeftLayers) -> Reason:
    if left.how in _PRODUCTS:
        product = _better(of(_PRODUCTS[left.how]), left.files)
        return of("quantised", format=left.name, product=product)
    if left.how in _OTHERS:
        return _better(of(_OTHERS[left.how], sort=left.name), left.files)
    return Reason.plain(left.name)


def _better(why: Reason, files: tuple[str, ...]) -> Reason:
    return joined([why, of("better_files", files=" or ".join(files))]) if files else why
