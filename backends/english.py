"""The English of what people read: the same file that the page has its own words from.

Other languages have the same keys and names in `locales/*/main.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

_FILE = Path(__file__).resolve().parents[1] / "locales" / "en" / "main.json"


def english(part: str) -> dict[str, str]:
    """Return the texts of one part of the file by key, with {names} for what stands in them."""
    found: dict[str, str] = json.loads(_FILE.read_text(encoding="utf-8"))["warmgraph"][part]
    return found
