"""Whether this machine has what compiling needs, and the command that installs what is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..contract import Requirement
from ..device.kinds import CPU
from ..reasons import of
from .registry import COMPILERS
from .toolchain import other_triton, wanted_triton

_TRITON = "triton"
_COMPILER = "compiler"
#: Without the workload it has no compiler; torch refuses one that does not speak English.
_BUILD_TOOLS = (
    "winget install Microsoft.VisualStudio.2022.BuildTools --override "
    '"--passive --wait --addProductLang en-US '
    '--add Microsoft.VisualStudio.Workload.VCTools --includeRecommended"'
)
#: By a distribution's `ID` or `ID_LIKE`: how its package manager gets a C and C++ compiler.
PACKAGES = {
    "debian": "sudo apt install build-essential",
    "ubuntu": "sudo apt install build-essential",
    "fedora": "sudo dnf install gcc gcc-c++",
    "rhel": "sudo dnf install gcc gcc-c++",
    "arch": "sudo pacman -S base-devel",
    "suse": "sudo zypper install gcc gcc-c++",
    "alpine": "sudo apk add build-base",
}


def needs(device: str) -> Iterator[Requirement]:
    """Yield what compiling for a device needs, by the backend that is preferred.

    Args:
        device: its type, as PyTorch names it.
    """
    preferred = COMPILERS[0]
    yield from preferred.requirements(device)
    yield from preferred.needs_to_build(device)


def doubts(device: str) -> Iterator[Requirement]:
    """Yield what is there and may not work; nothing is refused because of it.

    Args:
        device: its type, as PyTorch names it.
    """
    if device != CPU and (reason := other_triton()):
        remedy = of("do_install_that_triton", wanted=wanted_triton())
        yield Requirement("Triton", False, reason, remedy)


def install_command(
    requirement: Requirement,
    *,
    platform: str = sys.platform,
    environment: Mapping[str, str] = os.environ,
    release: Path = Path("/etc/os-release"),
    requires: Iterable[str] | None = None,
) -> str:
    """Return the command that installs what is missing, "" if unknown.

    Args:
        platform: as `sys.platform` names it.
        environment: variables of the server's process, by which conda is recognised.
        release: the file with a Linux distribution's name.
        requires: what torch's metadata requires; default: that of the torch that is installed.
    """
    name = requirement.name.casefold()
    if _TRITON in name:
        wheel = "triton-windows" if platform == "win32" else "triton"
        version = f"=={wanted}.*" if (wanted := wanted_triton(requires)) else ""
        return f'"{sys.executable}" -m pip install "{wheel}{version}"'
    if _COMPILER not in name:
        return ""
    if "CONDA_PREFIX" in environment:
        return "conda install -c conda-forge c-compiler cxx-compiler"
    if platform == "win32":
        return _BUILD_TOOLS
    if platform == "darwin":
        return "xcode-select --install"
    return next((PACKAGES[name] for name in _distribution(release) if name in PACKAGES), "")


def _distribution(release: Path) -> Iterator[str]:
    """Yield a Linux distribution's name, then those of similar ones."""
    try:
        lines = release.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    for field in ("ID", "ID_LIKE"):
        yield from fields.get(field, "").strip("\"'").split()
