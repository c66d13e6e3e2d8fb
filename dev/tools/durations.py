"""How long each file of tests takes, of a run's report: the longest come first in the next one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).resolve().parents[2] / "tests" / "durations.json"
#: What takes less has no place of its own.
_LEAST_S = 3


def record(reports: Iterable[Path]) -> None:
    """Write the seconds of each file down, of reports as `pytest --junitxml` writes them. Files
    that did not run keep theirs.
    """
    seconds: Counter[str] = Counter()
    for report in filter(Path.is_file, reports):
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            names = case.get("classname", "").removeprefix("tests.").split(".")
            module = next((n for n, name in enumerate(names) if name.startswith("test_")), None)
            if module is not None and case.find("skipped") is None:
                seconds["/".join(names[: module + 1]) + ".py"] += float(case.get("time", 0))
    known = {file: time for file, time in recorded().items() if (FILE.parent / file).is_file()}
    known |= {file: round(time) for file, time in seconds.items()}
    longest = sorted(known.items(), key=lambda row: -row[1])
    told = {file: time for file, time in longest if time >= _LEAST_S}
    FILE.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def recorded() -> dict[str, int]:
    """Return the seconds of each file, by its path below `tests`."""
    found: dict[str, int] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
