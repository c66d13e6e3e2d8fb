"""What of Windows itself gets in the way of compiling: long paths, names, and who holds files.

https://learn.microsoft.com/windows/win32/fileio/maximum-file-path-limitation
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .line import Line

#: The longest name that Inductor gives to a kernel of the models that we know.
KERNEL = "triton_per_fused_" + "x" * (142 - len("triton_per_fused_"))
#: The folder of a kernel has a name of 52 letters, and for a while a number of processes beside it.
_FOLDERS = ("k" * 52, "tmp.pid_1234567_" + "u" * 36)
#: Of a user's name of 20 letters: with it, our own files have paths short enough.
LONGEST_TEMP = len(r"C:\Users\12345678901234567890\AppData\Local\Temp")
FILES = 50
_SLOW_S = 0.5
_LIMIT = 260
_ENABLE = (
    r"as administrator type `reg add HKLM\SYSTEM\CurrentControlSet\Control\FileSystem "
    r"/v LongPathsEnabled /t REG_DWORD /d 1 /f`, and restart Windows"
)
_SHORTER = r"let the variables TEMP and TMP name a short folder, such as C:\t"


class Facts(NamedTuple):
    """What was found.

    Attributes:
        temporary: the folder for temporary files.
        home: the user's.
        long_paths: whether Windows' registry allows them; None: it does not say.
        long_name: why a kernel's file with the longest name cannot be made, "" if it can.
        slowest_s: of files written and renamed, how long the slowest took, in seconds.
        held: why one of them could not be, "" if all could.
    """

    temporary: str
    home: str
    long_paths: bool | None
    long_name: str
    slowest_s: float
    held: str


def look() -> Facts:
    """Try it in the folder for temporary files, and leave nothing there."""
    home = str(Path.home())
    with tempfile.TemporaryDirectory(prefix="warmgraph-doctor-") as folder:
        slowest, held = rename(Path(folder))
        name = long_name(Path(folder))
    return Facts(tempfile.gettempdir(), home, _are_long_paths_on(), name, slowest, held)


def lines(facts: Facts) -> Iterator[Line]:
    """Say what was found, and what to do."""
    yield _long_paths(facts)
    for name, path in (("TEMP", facts.temporary), ("user's folder", facts.home)):
        text = path
        if not path.isascii():
            text += "; not all programs read such letters. If the small compiled graph fails, "
            text += _SHORTER
        yield Line(name, True, text)
    remedy = f"a virus scanner may hold them: exclude {facts.temporary} from its scans"
    remedy += " (Windows Security, Virus & threat protection, Manage settings, Exclusions)"
    if facts.held:
        yield Line("files", False, f"one could not be renamed at once ({facts.held}); {remedy}")
        return
    text = f"{FILES} were written and renamed, the slowest in {facts.slowest_s:.2f} s"
    slow = facts.slowest_s > _SLOW_S
    yield Line("files", not slow, f"{text}; {remedy}" if slow else text)


def rename(folder: Path) -> tuple[float, str]:
    """Write and rename files, as the store does; return the slowest's seconds, and what failed."""
    slowest = 0.0
    for number in range(FILES):
        started = time.monotonic()
        try:
            written = folder / f"{number}.tmp"
            written.write_bytes(b"MZ" + bytes(4096))  # as a program's, which scanners look at
            os.replace(written, folder / f"{number}.dll")
        except OSError as error:
            return slowest, f"{error}"
        slowest = max(slowest, time.monotonic() - started)
    return slowest, ""


def long_name(folder: Path) -> str:
    """Make a kernel's file with the longest name, as Triton does; return why it cannot be."""
    file = folder.joinpath("triton", *_FOLDERS, f"{KERNEL}.cubin")
    try:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
    except OSError as error:
        return f"{error.strerror or error}"
    # Torch asks so, and takes a path that is too long for a file that is missing.
    return "" if os.path.exists(file) else "it is not found again"


def _long_paths(facts: Facts) -> Line:
    if not facts.long_name:
        return Line("long paths", True, f"a kernel's name of {len(KERNEL)} letters can be a file's")
    state = "are on, and yet" if facts.long_paths else "are off:"
    text = f"{state} a kernel's name of {len(KERNEL)} letters cannot be a file's "
    text += f"({facts.long_name})"
    length = len(facts.temporary)
    if length <= LONGEST_TEMP:
        advice = f"for other nodes that compile: {_ENABLE}"
        return Line("long paths", True, f"{text}. Warmgraph's names are shorter; {advice}")
    where = f"{facts.temporary} has {length} characters, of which {LONGEST_TEMP} leave room"
    return Line("long paths", False, f"{text}; {where} within {_LIMIT}; {_SHORTER}, or {_ENABLE}")


def _are_long_paths_on() -> bool | None:
    if sys.platform != "win32":
        return None
    import winreg

    place = r"SYSTEM\CurrentControlSet\Control\FileSystem"
    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, place) as key:
            return bool(winreg.QueryValueEx(key, "LongPathsEnabled")[0])
    except OSError:
        return None
