"""What is missing is named with the command that gets it, on each platform."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from warmgraph_backends.compilers import preflight, toolchain
from warmgraph_backends.compilers.preflight import doubts, install_command, needs
from warmgraph_backends.contract import Requirement
from warmgraph_backends.reasons import of
from warmgraph_backends.sessions import warnings

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


MADE_WITH_36 = ['triton==3.6.0; platform_system == "Linux"', "filelock", "pytorch-tritonx==9.9"]


def test_triton_is_named_as_it_is_called_there_in_the_version_that_torch_was_made_with() -> None:
    triton = Requirement("Triton", False)
    command = install_command(triton, platform="win32", requires=MADE_WITH_36)
    assert command.endswith('-m pip install "triton-windows==3.6.*"')
    command = install_command(triton, platform="linux", requires=MADE_WITH_36)
    assert command.endswith('-m pip install "triton==3.6.*"')
    assert install_command(triton, platform="win32", requires=[]).endswith('"triton-windows"')
    assert install_command(Requirement("torch", False), platform="linux") == ""


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("triton==3.6.0", "3.6"),
        ('triton~=3.8.0; platform_system == "Linux" and python_version < "3.15"', "3.8"),
        ("pytorch-triton == 3.7.1+git1b0418a9", "3.7"),
        ("triton>=3", ""),
        ("tritonclient==2.41.0", ""),
    ],
)
def test_the_wanted_version_is_that_of_torchs_metadata(line: str, version: str) -> None:
    assert toolchain.wanted_triton(["sympy>=1.13", line]) == version


def test_this_torch_says_which_triton_it_was_made_with_and_that_one_is_no_doubt() -> None:
    """The metadata of the wheel itself, also of Windows'."""
    if torch.__version__.startswith("2.11."):
        assert toolchain.wanted_triton() == "3.6"
    assert [*doubts("cpu")] == []
    if toolchain.wanted_triton() and sys.platform == "linux":  # where torch brings it along
        assert [*doubts("cuda")] == []


def test_a_triton_of_another_minor_version_is_told_with_the_command() -> None:
    reason = toolchain.other_triton("3.6", "3.8.0")
    assert reason == "Triton 3.8.0 is installed, and this PyTorch was made with 3.6"
    fitting = (("3.6", "3.6.2"), ("3.6", "3.6.0.post26"), ("", "3.8.0"), ("3.6", ""), ("3.6", "x"))
    assert not any(toolchain.other_triton(*versions) for versions in fitting)
    assert toolchain.other_triton("3.1", "3.10.0")


def cpp(
    environment: dict[str, str], *there: str, platform: str = "win32", language: int | None = None
) -> tuple[bool, str, str]:
    """What is said of a C++ compiler, if these programs are on the path."""
    found = toolchain.cpp_compiler(
        platform=platform,
        environment=environment,
        which=lambda name: name if name in there else None,
        language=lambda _path: language,
    )
    return found.met, found.reason.key, found.remedy.key


def test_a_cpp_compiler_counts_as_torch_counts_it_on_windows() -> None:
    ready = {"INCLUDE": "C:\\include"}
    assert cpp(ready, "cl", language=0x0409)[0]
    assert cpp(ready, "cl")[0]  # without a version, torch does not refuse it either
    german = (False, "cpp_compiler_not_english", "do_install_english")
    assert cpp(ready, "cl", language=0x0407) == german
    assert cpp({"CXX": "D:\\vc\\CL.EXE"}, "D:\\vc\\CL.EXE", language=0x0407) == german
    assert cpp({}, "cl") == (False, "no_cpp_headers", "do_start_from_cpp_prompt")
    missing = (False, "no_cpp_compiler", "do_install_cpp_workload")
    assert cpp(ready) == missing
    assert cpp(ready, "clang++", "g++", "c++", "clang-cl") == missing  # torch looks for cl only
    assert cpp({"CXX": "clang-cl"}, "cl") == missing
    for name in ("clang-cl", "C:\\LLVM\\bin\\clang-cl.exe", "icx-cl"):
        assert cpp({"CXX": name}, name, language=0x0407)[0], name
    for name in ("clang++", "clang", "C:\\LLVM\\bin\\Clang++.exe", "g++", "icx"):
        refused = cpp({"CXX": name}, name, "cl")
        assert refused == (False, "refused_cpp_compiler", "do_name_clang_cl"), name


def test_a_cpp_compiler_counts_as_torch_counts_it_elsewhere() -> None:
    missing = (False, "no_cpp_compiler", "do_install_one")
    assert cpp({}, "g++", platform="linux")[0]
    assert cpp({}, "clang++", "c++", platform="linux") == missing
    assert cpp({"CXX": "clang++"}, "clang++", platform="linux")[0]
    assert cpp({"CXX": "clang++"}, "g++", platform="linux") == missing
    assert cpp({}, "clang++", platform="darwin")[0]


ASKS_TORCH = """
from torch._inductor import cpp_builder
cpp_builder._is_clang(cpp_builder.get_cpp_compiler())
"""


@pytest.mark.parametrize("name", ["", "clang-cl", "clang++", "no-such-compiler"])
def test_torch_itself_takes_and_refuses_the_same(name: str) -> None:
    """With what is on this machine."""
    environment = {each: value for each, value in os.environ.items() if each != "CXX"}
    environment |= {"CXX": name} if name else {}
    ours = toolchain.cpp_compiler(environment=environment)
    asked = subprocess.run([sys.executable, "-c", ASKS_TORCH], env=environment, capture_output=True)
    if sys.platform != "win32" or asked.returncode:  # there we also look at INCLUDE
        assert ours.met is (asked.returncode == 0), asked.stderr.decode()[-500:]


@pytest.mark.skipif(sys.platform != "win32", reason="only Windows' programs say their language")
def test_a_programs_language_is_what_torch_reads() -> None:
    from torch._inductor.cpp_builder import WinPeFileVersionInfo

    system = Path(os.environ["SYSTEMROOT"], "System32")
    found = {}
    for path in (Path(sys.executable), *(system / name for name in ("cmd.exe", "notepad.exe"))):
        try:
            told = WinPeFileVersionInfo(str(path)).get_language_id()
        except RuntimeError:  # it has no such resource
            told = None
        found[path] = toolchain.language_of(str(path)), told
    assert all(ours == torchs for ours, torchs in found.values()), found
    assert any(ours is not None for ours, _ in found.values()), found
    assert toolchain.language_of(__file__) is None


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: str) -> list[str]:
        return [need.name for need in needs(device) if not need.met]

    if sys.platform != "win32":
        assert "C++ compiler" not in missing("cpu")  # the tests need one themselves
    monkeypatch.setenv("PATH", "")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert missing("cpu") == ["C++ compiler"]
    if sys.platform != "win32":  # where triton-windows brings its own
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
def test_each_need_is_told_with_what_the_compiler_says_as_data_that_pages_translate(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    reason, remedy = of("no_triton"), of("do_install_one")
    wanted = [
        need._replace(met=False, reason=need.reason or reason, remedy=need.remedy or remedy)
        for need in needs(device)
    ]
    monkeypatch.setattr(warnings, "needs", lambda _device: wanted)
    found = warnings.of_machine()
    assert len(found) == len(wanted) > 1
    for need, warning in zip(wanted, found, strict=True):
        assert need.name.split()[-1].casefold() in warning.title.casefold()
        text = f"Nothing can be compiled: {need.reason}; {need.remedy}; then restart ComfyUI."
        assert warning.text == text
        assert {*warning.plain()["lines"][1]["reasons"]} == {"reason", "remedy"}
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


@pytest.mark.usefixtures("_looked_at_anew")
def test_what_may_not_fit_is_told_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    need = Requirement("Triton", False, of("other_triton", found="3.8.0", wanted="3.6"))
    need = need._replace(remedy=of("do_install_that_triton", wanted="3.6"))
    monkeypatch.setattr(warnings, "needs", lambda _device: [Requirement("torch", True)])
    monkeypatch.setattr(warnings, "doubts", lambda _device: [need])
    (warning,) = warnings.of_machine()
    assert warning.title == "Triton may not fit"
    assert warning.text == (
        "Compiling may fail: Triton 3.8.0 is installed, and this PyTorch was made with 3.6; "
        "install Triton 3.6, which on Windows is triton-windows 3.6; then restart ComfyUI."
    )
    assert warning.command == preflight.install_command(need) != ""


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
