"""What is missing is named with the command that gets it, on each platform."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from warmgraph_backends.compilers.preflight import install_command, needs
from warmgraph_backends.contract import Requirement
from warmgraph_backends.sessions import warnings
from warmgraph_backends.sessions.lines import ENGLISH

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


@pytest.fixture
def _looked_at_anew() -> Iterator[None]:
    warnings._of.cache_clear()
    yield
    warnings._of.cache_clear()


@pytest.mark.usefixtures("_looked_at_anew")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_each_need_is_told_in_a_sentence_of_its_own_which_says_what_the_compiler_says(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Its own, for pages in other languages: what the compiler says is English."""
    wanted = [need._replace(met=False, reason=need.reason or "it is old") for need in needs(device)]
    monkeypatch.setattr(warnings, "needs", lambda _device: wanted)
    found = warnings.of_machine()
    assert len(found) == len(wanted) > 1
    for need, warning in zip(wanted, found, strict=True):
        assert need.name.split()[-1].casefold() in warning.title.casefold()
        text = f"Nothing can be compiled: {need.reason}; {need.remedy}"
        told, ends = re.subn("[;,] then restart ComfyUI\\.$", "", warning.text)
        assert ends == 1, warning.text
        plain = [re.sub(r" \([^)]*\)", "", each) for each in (told, text)]
        assert plain[0] == plain[1]
        if need.name != "NVIDIA CUDA":  # whose lack is none: then it is the processor that is asked
            assert warning.lines[0].key != "mend_other", need.name


@pytest.mark.usefixtures("_looked_at_anew")
def test_a_warning_is_data_that_a_page_may_show_in_its_language(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need = Requirement("elbow room", False, "there is none", "make some")
    monkeypatch.setattr(warnings, "needs", lambda _device: [need])
    (warning,) = warnings.of_machine()
    assert warning.plain() == {
        "id": "missing elbow room",
        "title": "elbow room is missing",
        "text": "Nothing can be compiled: there is none; make some; then restart ComfyUI.",
        "command": "",
        "lines": [
            {
                "key": key,
                "values": {name: getattr(need, name) for name in ("name", "reason", "remedy")},
                "text": text,
            }
            for key, text in (("mend_other", warning.title), ("mend_other_why", warning.text))
        ],
    }
    assert {f"{key}_why" for key in ENGLISH if re.fullmatch("mend_(?!.*_why).*", key)} == {
        key for key in ENGLISH if re.fullmatch("mend_.*_why", key)
    }


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch knows no NVIDIA card")
@pytest.mark.usefixtures("_looked_at_anew")
def test_a_card_that_was_hidden_while_the_server_was_loaded_is_asked_about_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a process is kept in a memory snapshot and goes on where its card is."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "/usr/bin/gcc")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "missing C++ compiler" in {each.id for each in warnings.of_machine()}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    told = {each.id for each in warnings.of_machine()}
    assert not told & {"missing C++ compiler", "missing C compiler", "missing NVIDIA CUDA"}
