"""What a block is given that counts for nothing: whole numbers and options which, whatever they
are, change no operator that it comes to, such as its own number for patches of other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import LearnError
from .calls import Call
from .options import ABSENT, Reads
from .values import put_together

#: Makes a call with other arguments and options; returns the operators that it came to.
Again = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]


@dataclass
class Tried:
    """Of one call.

    Attributes:
        numbers: leaves that count for nothing.
        options: likewise, by name.
        operators: of the call, as a text.
    """

    numbers: list[int] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    operators: str = ""


def try_others(again: Again, stream: Any, call: Call, reads: Reads) -> Tried:
    """Make a block's call with others in the place of each number and option.

    Args:
        again: makes it.
        stream: the operators of the call itself.
        call: it.
        reads: what it read of its options.
    """
    tried = Tried(operators=repr(stream))
    for i, value in enumerate(call.leaves):
        if type(value) is int:
            others = [_with(call, i, other) for other in _numbers(value)]
            if all(_is_same(again, stream, other, {}) for other in others):
                tried.numbers.append(i)
    for name, value in reads.values.items():
        other = _other(value)
        if other is not None and _is_same(again, stream, {}, {name: other}):
            tried.options.append(name)
    return tried


def _is_same(again: Again, stream: Any, changed: Any, options: Mapping[str, Any]) -> bool:
    try:
        return bool(again(changed, options) == stream)
    except LearnError:
        return False
    except Exception:  # of the host's code: it does count
        return False


def _with(call: Call, leaf: int, value: int) -> dict[str, Any]:
    """The arguments that hold a leaf, with another one there."""
    leaves = [value if i == leaf else each for i, each in enumerate(call.leaves)]
    return {
        name: put_together(template, leaves)
        for name, template in call.facts["arguments"]
        if _holds(template, leaf)
    }


def _holds(template: Any, leaf: int) -> bool:
    if template == ["leaf", leaf]:
        return True
    return isinstance(template, list) and any(_holds(each, leaf) for each in template)


def _numbers(value: int) -> tuple[int, ...]:
    return (value + 1, 2 * value + 7, 0, 1, value + 1000)


def _other(value: Any) -> Any:
    """Another value of the same sort, None where there is none to try."""
    if value == ABSENT or isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return 2 * value + 1
    if isinstance(value, str):
        return f"{value} {value}"
    if isinstance(value, (list, tuple)) and value:
        made = [_other(each) for each in value]
        return None if any(each is None for each in made) else type(value)(made)
    return None
