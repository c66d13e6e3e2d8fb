"""What is missing is named with the command that gets it, on each platform."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmgraph_backends.compilers.preflight import install_command, needs
from warmgraph_backends.contract import Requirement

COMPILER = Requirement("C++ compiler", False)


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=debian", "sudo apt install build-essential"),
        ('NAME="Linux Mint"\nID=linuxmint\nID_LIKE="ubuntu debian"', "sudo apt install"),
        ("ID=fedora", "sudo dnf install gcc gcc-c++"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"', "sudo dnf install"),
        ("ID=arch", "sudo pacman -S base-devel"),
        ("ID=manjaro\nID_LIKE=arch", "sudo pacman -S base-devel"),
        ('ID="opensuse-tumbleweed"\nID_LIKE="opensuse suse"', "sudo zypper install"),
        ("ID=alpine", "sudo apk add"),
        ("ID=unheardof", ""),
        ("no equals sign\n=\n", ""),
    ],
)
def test_a_distributions_own_package_manager_is_named(
    tmp_path: Path, release: str, command: str
) -> None:
    file = tmp_path / "os-release"
    file.write_text(release)
    found = install_command(COMPILER, platform="linux", environment={}, release=file)
    assert found.startswith(command) and bool(found) == bool(command)


def test_a_conda_environment_gets_its_own_compiler_and_windows_and_macs_theirs(
    tmp_path: Path,
) -> None:
    conda = {"CONDA_PREFIX": "/opt/conda"}
    assert install_command(COMPILER, platform="linux", environment=conda).startswith("conda ")
    gone = tmp_path / "gone"
    assert install_command(COMPILER, platform="linux", environment={}, release=gone) == ""
    assert "BuildTools" in install_command(COMPILER, platform="win32", environment={})
    assert "xcode-select" in install_command(COMPILER, platform="darwin", environment={})


def test_triton_is_named_as_it_is_called_there() -> None:
    triton = Requirement("Triton", False)
    assert install_command(triton, platform="win32").endswith("-m pip install triton-windows")
    assert install_command(triton, platform="linux").endswith("-m pip install triton")
    assert install_command(Requirement("torch", False), platform="linux") == ""


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: str) -> list[str]:
        return [need.name for need in needs(device) if not need.met]

    assert "C++ compiler" not in missing("cpu")  # the tests need one themselves
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert missing("cpu") == ["C++ compiler"]
    assert "C compiler" in missing("cuda")
    monkeypatch.setenv("CC", "/usr/bin/tcc")
    assert "C compiler" not in missing("cuda")
