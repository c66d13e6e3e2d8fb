"""One way to write plain data as text, and its hash: equal facts make equal keys everywhere."""

from __future__ import annotations

import hashlib
import json
from typing import Any


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
