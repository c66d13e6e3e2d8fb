"""Machines that share a remote store: each with a local one and a signing key."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warmgraph_backends.fleet.remote import Remote
from warmgraph_backends.fleet.settings import FleetSettings
from warmgraph_backends.storing.public_keys import Keyring
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store

PRIVATE = Path("user", "__warmgraph")
TARGET = "0123456789abcdef"
#: No test of a remote waits longer for anything.
PATIENCE_S = 60.0


class Machine:
    """One machine, over a remote store."""

    def __init__(
        self,
        root: Path,
        url: str,
        *,
        mode: str = "write",
        patience_s: float = 10.0,
        options: dict[str, Any] | None = None,
        key_of: Path | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        private = root / PRIVATE
        private.mkdir(parents=True, exist_ok=True)
        if key_of is not None:
            shutil.copy2(key_of / PRIVATE / "signing.key", private)
        self.root = root
        self.signer = Signer(private, keyring or Keyring())
        self.store = Store(
            root / "models" / "compiled_graphs",
            self.signer,
            cap_bytes=lambda: 1 << 30,
            private=private,
        )
        settings = FleetSettings(url, mode, patience_s, options or {})
        self.faults: list[str] = []
        self.remote = Remote(settings, self.store, self.signer, on_fault=self.faults.append)

    def mirror(self) -> None:
        """Start as a server does; returns when nothing more comes."""
        self.remote.mirror(TARGET)
        assert self.remote.finish()

    def look(self, keys: Sequence[str]) -> int:
        """Look for graphs; returns how many of them were looked for, when all were told."""
        done = threading.Semaphore(0)
        asked = [key for key in keys if self.remote.look(key, TARGET, done.release)]
        for _ in asked:
            assert done.acquire(timeout=PATIENCE_S)
        return len(asked)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Whether each of these graphs loads from the local store."""
        return [self.store.find(key) is not None and bool(self.store.load(key)) for key in keys]

    def comes(self, key: str) -> bool:
        """Whether a graph comes into the local store, at last."""
        until = time.monotonic() + PATIENCE_S
        while self.store.find(key) is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.has([key]) == [True]

    def push(self, keys: Sequence[str]) -> None:
        """Send graphs of the local store; returns when none is on its way."""
        for key in keys:
            path = self.store.find(key)
            assert path is not None
            self.remote.push(path, key, TARGET)
        assert self.remote.finish()
