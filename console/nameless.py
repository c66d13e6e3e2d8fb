"""Takes the names of people, computers and folders out of a text that is to be sent."""

from __future__ import annotations

import getpass
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

#: A path of two folders and more, up to its last name; with a drive it may hold spaces.
_PATH = re.compile(
    r"""\b[A-Za-z]:[\\/]+(?:[^\\/:;,"'()<>]+[\\/]+)+"""
    r"""|(?<![\w.>/:\\])[\\/]{1,2}(?:[^\s\\/:;,"'()]+[\\/]+)+"""
)
_ELSEWHERE = "<a folder>"
_SHORTEST = 2


def of_machine(places: Mapping[Path, str]) -> dict[str, str]:
    """Return what stands for each name of this machine.

    Args:
        places: folders, and what stands for them.
    """
    folders = {**places, Path(sys.prefix): "<Python>", Path(tempfile.gettempdir()): "<temporary>"}
    folders[Path.home()] = "<home>"
    found = {str(path): stands for path, stands in folders.items() if len(path.parts) > 1}
    found |= {str(path.resolve()): found[str(path)] for path in folders if str(path) in found}
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a number without a name
        user = ""
    named = {user: "<user>", Path.home().name: "<user>", platform.node(): "<computer>"}
    return found | {name: stands for name, stands in named.items() if len(name) >= _SHORTEST}


def text(words: str, names: Mapping[str, str]) -> str:
    """Return a text with its names replaced, the longest first, and without other folders."""
    for name in sorted(names, key=len, reverse=True):
        found = r"[\\/]+".join(map(re.escape, re.split(r"[\\/]+", name)))
        stands = names[name].replace("\\", r"\\")
        words = re.sub(rf"(?<!\w){found}(?!\w)", stands, words, flags=re.IGNORECASE)
    return _PATH.sub(f"{_ELSEWHERE}/", words)
