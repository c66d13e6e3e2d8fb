"""Result files: one per case, and the flat headline made from them."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

from .figures import FIGURES

HEADLINE = "headline.json"


#: Of the host that figures are of, unless they say otherwise.
HOST = "0.30"


def case_name(name: str, host: str | None) -> str:
    """Return what a case's file is called: figures of another version of the host have one of their
    own.
    """
    version = None if host is None else ".".join(host.split(".")[:2])
    return name if version in (None, HOST) else f"{name}-host{version}"


def write_case(folder: Path, name: str, case: dict[str, Any]) -> None:
    """Write one case's file, with the date."""
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    _write(folder / f"{name}.json", {"name": name, "date": date, **case})


def collect(folder: Path) -> dict[str, dict[str, Any]]:
    """Make the headline from the case files; figures of failed or missing cases are left out."""
    cases: dict[str, dict[str, Any]] = {}
    for path in folder.glob("*.json"):
        if path.name != HEADLINE:
            cases[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    headline = {}
    for name, figure in FIGURES.items():
        used = [cases.get(case) for case in figure.cases]
        good = [case for case in used if case is not None and case.get("ok")]
        if not good or (len(good) != len(used) and not figure.any_of):
            continue
        if any(case.get("smoke") for case in good):
            continue
        try:
            value = figure.read(*good)
        except (KeyError, ValueError):  # a row that was stopped or never run
            continue
        if value is None:  # not measured on this machine
            continue
        headline[name] = {
            "value": value,
            "unit": figure.unit,
            "gpu": " and ".join(sorted({case["gpu"] for case in good})),
            "torch": good[-1]["torch"],
            "host": good[-1]["host"],
            "date": good[-1]["date"],
        }
    if headline:
        _write(folder / HEADLINE, headline)
    return headline


def table(folder: Path, names: list[str], host: str | None = None) -> list[str]:
    """A short table: each case with its outcome, then the headline with its bars."""
    lines = []
    for name in (case_name(each, host) for each in names):
        path = folder / f"{name}.json"
        if not path.exists():
            lines.append(f"{name:24} not run")
            continue
        case = json.loads(path.read_text(encoding="utf-8"))
        outcome = "ok" if case.get("ok") else f"FAILED: {case.get('reason', '')[:150]}"
        lines.append(f"{name:24} {case.get('seconds', 0):6.0f} s  {outcome}")
        lines += [f"    {line}" for line in case.get("lines", [])]
    for name, entry in collect(folder).items():
        bar = FIGURES[name].bar
        lines.append(f"{name:44} {entry['value']!s:>10} {entry['unit']:16} {bar}".rstrip())
    return lines


def _write(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1, sort_keys=False) + "\n", encoding="utf-8")
    os.replace(part, path)
