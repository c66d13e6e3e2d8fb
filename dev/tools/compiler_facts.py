"""What build workers find out about the C++ compiler, shared by all servers and engines of one run
of the tests: each of them has a folder of its own, in which it would find that out anew.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: Names the folder that they share; without it nothing is shared.
VARIABLE = "WARMGRAPH_TEST_COMPILER"

#: Where others of this process found something out.
_spools: list[Path] = []


def share(private: Path) -> None:
    """Lend the server or engine of this private folder what is known so far, and take what it finds
    out when this is next asked for.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return
    pool, spool = Path(named), private / "spool"
    for folder in (pool, spool):
        folder.mkdir(parents=True, exist_ok=True)
    for known in _spools:
        _link(known, pool)
    _link(pool, spool)
    _spools.append(spool)


def _link(source: Path, target: Path) -> None:
    from warmgraph_backends.building.messages import REMEMBERED

    for file in source.glob(f"*{REMEMBERED}"):
        with contextlib.suppress(FileExistsError):  # another process may put it there, too
            os.link(file, target / file.name)
