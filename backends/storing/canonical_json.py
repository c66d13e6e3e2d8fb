"""One way to write plain data as text, and its hash, so that equal facts make equal keys
everywhere; and a strict way to read such text of any origin.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NoReturn

_DIGITS = 20  # of an integer: what 64 bits hold, with a sign


def canonical_json(value: Any) -> str:
    """Write plain data as the only JSON text that it has.

    Keys are sorted, there are no spaces and no non-ASCII characters, so the text is the same in
    every process, with every hash seed and on every system. Tuples are written as lists. Nothing is
    guessed: sets, NaN and keys that are not text (JSON would merge `1` and `"1"`) are refused.

    Args:
        value: dicts with text keys, lists, tuples, str, int, float, bool and None.

    Returns:
        The text, ASCII only.

    Raises:
        TypeError: something in `value` has no JSON form, or a dict has a key that is not text.
        ValueError: a float is NaN or infinite.
    """
    _check_keys(value)
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def read_json(text: str | bytes) -> Any:
    """Read JSON text of any origin; what comes out may still be of any shape and depth.

    Unlike `json.loads` it takes no NaN, no infinity, and no integers of more than 64 bits, which
    take minutes to read when there are millions of digits.

    Args:
        text: a text, or the bytes of one in UTF-8.

    Raises:
        ValueError: it is no such text; nothing else is raised, whatever is in it.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(
            decoded, parse_int=_integer, parse_float=_finite, parse_constant=_no_number
        )
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def sha256_hex(data: bytes | str) -> str:
    """Return the SHA-256 of bytes, or of text as UTF-8, as 64 lower-case hex digits."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key must be text, got {key!r}")
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"it holds an integer of {len(digits)} characters")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError("it holds a number out of range")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no number of JSON's")
