"""What `doctor` asks of Windows: facts are given, or looked for here, and under Wine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from warmgraph_console import windows
from warmgraph_console.line import Line

WELL = windows.Facts(
    temporary=r"C:\Users\Zoe\AppData\Local\Temp",
    home=r"C:\Users\Zoe",
    long_paths=True,
    long_name="",
    slowest_s=0.02,
    held="",
)
TOO_LONG = {"long_paths": False, "long_name": "The system cannot find the path specified"}


def told(**facts: object) -> dict[str, Line]:
    return {line.name: line for line in windows.lines(WELL._replace(**facts))}


def test_where_all_is_well_nothing_is_to_be_done() -> None:
    lines = told()
    assert [*lines] == ["long paths", "TEMP", "user's folder", "files"]
    assert all(line.ok for line in lines.values())
    assert lines["files"].text == "50 were written and renamed, the slowest in 0.02 s"


def test_long_paths_are_asked_for_where_our_own_names_need_them() -> None:
    off = told(**TOO_LONG)["long paths"]
    assert off.ok and "Warmgraph's names are shorter; for other nodes that compile: as" in off.text
    deep = "C:\\Users\\Zoe\\" + "deep\\" * 10 + "Temp"
    lacking = told(**TOO_LONG, temporary=deep)["long paths"]
    assert not lacking.ok and lacking.text.startswith("are off: a kernel's name of 142 letters")
    assert f"{deep} has {len(deep)} characters" in lacking.text
    assert r"C:\t, or as administrator type `reg add HKLM\SYSTEM" in lacking.text
    assert told(temporary=deep)["long paths"].ok
    on = told(**{**TOO_LONG, "long_paths": True}, temporary=deep)["long paths"]
    assert not on.ok and on.text.startswith("are on, and yet a kernel's name")


@pytest.mark.parametrize(("name", "fact"), [("TEMP", "temporary"), ("user's folder", "home")])
def test_letters_that_not_all_programs_read_are_told_and_are_no_fault(name: str, fact: str) -> None:
    line = told(**{fact: r"C:\Users\Zoë"})[name]
    assert line.ok and r"If the small compiled graph fails, let the variables TEMP" in line.text
    assert told()[name].text == getattr(WELL, fact)


def test_a_scanner_that_holds_files_is_told_with_the_folder_to_exclude() -> None:
    slow = told(slowest_s=1.25)["files"]
    assert not slow.ok and "the slowest in 1.25 s; a virus scanner may hold them" in slow.text
    held = told(held="[WinError 32] it is used by another process")["files"]
    assert not held.ok and "could not be renamed at once ([WinError 32]" in held.text
    assert f"exclude {WELL.temporary} from its scans" in held.text


def test_what_is_tried_is_tried_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(windows.KERNEL) == 142
    slowest, held = windows.rename(tmp_path)
    assert held == "" and 0 < slowest < 60
    assert len([*tmp_path.glob("*.dll")]) == len([*tmp_path.iterdir()]) == windows.FILES
    assert windows.long_name(tmp_path) == ""
    assert "triton" in os.listdir(tmp_path)
    (tmp_path / "file").touch()
    assert windows.long_name(tmp_path / "file")
    assert windows.rename(tmp_path / "file")[1]
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path))
    facts = windows.look()
    assert facts.long_name == "" and facts.held == ""
    assert (facts.long_paths is None) or sys.platform == "win32"
