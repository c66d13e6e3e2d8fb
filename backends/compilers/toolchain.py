"""Which Triton and which C++ compiler torch takes here, found without importing or running either.

Follows `torch._inductor.cpp_builder`, and what torch's own metadata requires.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import PureWindowsPath
from typing import Any

from ..contract import Requirement
from ..reasons import NOTHING, Reason, of
from ..torch_api.version_files import constants_of

_CXX = "CXX"
#: What torch calls where CXX names nothing.
_USUAL = {"win32": "cl", "darwin": "clang++"}
_ELSEWHERE = "g++"
#: On Windows torch writes arguments as `cl` reads them. It refuses some of these by name.
_OTHER_ARGUMENTS = re.compile(r"(clang|clang\+\+|gcc|g\+\+|c\+\+|icx|icx-cc)(\.exe)?", re.I)
_ENGLISH = 0x0409
_MINOR = re.compile(r"(\d+\.\d+)\b")


def wanted_triton(requires: Iterable[str] | None = None) -> str:
    """Return the minor version of Triton that torch was made with, "3.6"; "" if it does not say.

    Args:
        requires: the lines of torch's metadata; default: those of the torch that is installed.
    """
    if requires is None:
        try:
            requires = metadata.requires("torch") or ()
        except metadata.PackageNotFoundError:
            return ""
    for line in requires:
        found = re.match(r"(?:pytorch-)?triton\s*[=~]=\s*(\d+\.\d+)\b", line)
        if found is not None:
            return found[1]
    return ""


def other_triton(wanted: str | None = None, found: str | None = None) -> Reason:
    """Return why the Triton that is installed may not work with torch; NOTHING if it fits.

    Args:
        wanted: as of `wanted_triton`, whose answer is the default.
        found: the version that is installed; default: as its files say.
    """
    wanted = wanted_triton() if wanted is None else wanted
    if found is None:
        found = str(constants_of("triton", "__init__.py").get("__version__", ""))
    minor = _MINOR.match(found)
    if not wanted or minor is None or minor[1] == wanted:
        return NOTHING
    return of("other_triton", found=found, wanted=wanted)


def cpp_compiler_name(
    platform: str = sys.platform, environment: Mapping[str, str] = os.environ
) -> str:
    """Return the C++ compiler that torch calls; see `cpp_compiler`."""
    return environment.get(_CXX) or _USUAL.get(platform, _ELSEWHERE)


def cpp_compiler(
    *,
    platform: str = sys.platform,
    environment: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    language: Callable[[str], int | None] | None = None,
) -> Requirement:
    """Say whether torch finds a C++ compiler that it takes.

    Args:
        platform: as `sys.platform` names it.
        environment: variables of the process.
        which: finds a program.
        language: reads a program's language; default: `language_of`.
    """

    def unmet(reason: Reason, remedy: str) -> Requirement:
        return Requirement("C++ compiler", False, reason, of(remedy))

    name = cpp_compiler_name(platform, environment)
    on_windows = platform == "win32"
    if on_windows and _OTHER_ARGUMENTS.fullmatch(PureWindowsPath(name).name):
        return unmet(of("refused_cpp_compiler", name=name), "do_name_clang_cl")
    path = which(name)
    if path is None:
        remedy = "do_install_cpp_workload" if on_windows else "do_install_one"
        return unmet(of("no_cpp_compiler", name=name), remedy)
    if on_windows and PureWindowsPath(path).stem.casefold() == "cl":
        if (language or language_of)(path) not in (None, _ENGLISH):
            return unmet(of("cpp_compiler_not_english", path=path), "do_install_english")
        if not environment.get("INCLUDE"):
            return unmet(of("no_cpp_headers", path=path), "do_start_from_cpp_prompt")
    return Requirement("C++ compiler", True)


def language_of(path: str) -> int | None:
    """Return the language of a program of Windows as its version resource has it, None if none.

    As torch's `WinPeFileVersionInfo` reads it: 0x0409 is English (United States).
    """
    import ctypes

    version: Any = ctypes.WinDLL("version.dll")  # type: ignore[attr-defined]
    size = version.GetFileVersionInfoSizeW(path, None)
    buffer = ctypes.create_string_buffer(max(size, 1))
    if not size or not version.GetFileVersionInfoW(path, 0, size, buffer):
        return None
    place, length = ctypes.c_void_p(), ctypes.c_uint()
    key = r"\VarFileInfo\Translation"
    found = version.VerQueryValueW(buffer, key, ctypes.byref(place), ctypes.byref(length))
    if not found or length.value < 4 or place.value is None:
        return None
    # torch looks at the last one.
    return int.from_bytes(ctypes.string_at(place.value + length.value // 4 * 4 - 4, 2), "little")
