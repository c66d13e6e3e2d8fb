"""`python dev windows` is green only if what fails under Wine is what is known to fail there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from warmgraph_tools import windows

TESTS = Path(__file__).resolve().parents[1]
MADE_UP = """
import pytest

@pytest.fixture
def broken():
    raise OSError("no such thing here")

@pytest.mark.parametrize("number", [1, 2])
def test_one_of_two_fails(number): assert number == 1

def test_it_passes(): pass

def test_it_cannot_begin(broken): pass

@pytest.mark.skip
def test_it_is_skipped(): assert False
"""


@pytest.fixture
def failed(tmp_path: Path) -> set[str]:
    """Of tests that pytest really runs, in a process of its own."""
    (tmp_path / "test_made_up.py").write_text(MADE_UP, "utf-8")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, check=False)
    return windows.failures(report)


def test_what_fails_is_read_from_pytests_report(failed: set[str]) -> None:
    assert failed == {"test_one_of_two_fails", "test_it_cannot_begin"}


def test_a_new_failure_and_a_known_one_that_passes_are_both_told() -> None:
    known = {"test_a": "Wine has no a", "test_b": "Wine has no b"}
    assert windows.judge({"test_a", "test_b"}, known) == []
    assert windows.judge({"test_a", "test_c"}, known) == [
        "FAILED test_c",
        "test_b passes, though it is said that: Wine has no b",
    ]


def test_what_is_known_to_fail_is_there_and_in_a_room() -> None:
    rooms = {file for files in windows.ROOMS.values() for file in files}
    assert set(windows.KNOWN) <= rooms
    for file in rooms:
        text = (TESTS / file).read_text("utf-8")
        there = {*re.findall(r"def (test_\w+)", text), f"tests.{file[:-3].replace('/', '.')}"}
        assert set(windows.KNOWN.get(file, {})) <= there, file
        assert all(reason for reason in windows.KNOWN.get(file, {}).values())
