"""What the doctor says of a fleet: the store that machines share, and the keys of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from warmgraph_backends.fleet.fleet import FAULT_FILE, remote_problems
from warmgraph_backends.fleet.keys import signer_for
from warmgraph_backends.fleet.schemes import redacted
from warmgraph_backends.fleet.settings import read_settings

from .line import Line

_MOST_BYTES = 4096


def fleet(private: Path) -> Iterator[Line]:
    """Look at what was asked for; nothing is opened."""
    settings = read_settings(private)
    signer, problems = signer_for(private, settings)
    for problem in settings.problems:
        yield Line("fleet", False, str(problem))
    if settings.remote:
        text = f"{redacted(settings.remote)}, mode {settings.mode}"
        text += f", patience {settings.patience_s:g} s; {_last_fault(private)}"
        wrong = remote_problems(settings)
        yield Line("remote store", not wrong, "; ".join([text, *map(str, wrong)]))
    for problem in problems:
        yield Line("keys", False, str(problem))
    ring = signer.keyring
    if ring.private is not None:
        name = ring.private.public.name
        yield Line("keys", True, f"signs with {name} ({signer.fingerprint})")
    elif not ring.has_own:
        yield Line("keys", True, "none that signs, as was asked for")
    if ring.trusted:
        names = ", ".join(f"{key.name} ({key.fingerprint})" for key in ring.trusted)
        yield Line("keys", True, f"trusts {names}")


def _last_fault(private: Path) -> str:
    try:
        with open(private / FAULT_FILE, encoding="utf-8", errors="replace") as file:
            return f"last fault {file.read(_MOST_BYTES).strip()}"
    except OSError:
        return "no fault yet"
