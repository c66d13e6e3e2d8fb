"""Step numbers as a user writes them."""

from __future__ import annotations

from ..errors import shown, validate_length

#: Of a step's number.
_DIGITS = 6


def parse_steps(text: str) -> list[int]:
    """Read a list of step numbers such as `0,1,2,5,9`.

    Raises:
        ValueError: it is not a list of whole numbers from 0 on.
    """
    validate_length("full steps", text)
    parts = [part.strip() for part in text.replace("\n", ",").split(",")]
    if not all(map(_is_number, filter(None, parts))) or not any(parts):
        raise ValueError(
            f"full steps must be numbers from 0 on such as 0,1,2,5,9, got {shown(text)}"
        )
    return sorted({int(part) for part in parts if part})


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) <= _DIGITS
