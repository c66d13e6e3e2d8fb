"""The English of what people read: the same file that the page has its own words from.

Other languages have the same keys and names in `locales/*/main.json`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).resolve().parents[1] / "locales" / "en" / "main.json"


@cache
def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))["warmgraph"]
    return found


def english(part: str) -> dict[str, str]:
    """Return the texts of one part of the file by key, with {names} for what stands in them."""
    found: dict[str, str] = _read()[part]
    return found
