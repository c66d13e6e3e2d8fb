"""Rows of tests that say the same of each: some for every run, the others where all tests are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_rows(rows: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All rows; those that are not `quick` are marked slow."""
    return [pytest.param(row, marks=[] if row in quick else pytest.mark.slow) for row in rows]
