"""What a server process has of its fleet: its keys, the remote store, and claims there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..building.claims import Claims
from ..reasons import Reason, of
from ..storing.files import write_whole
from ..storing.store import Store
from .claims import FleetClaims
from .keys import signer_for
from .remote import Remote
from .schemes import SCHEMES, missing_package, scheme_of
from .settings import WRITE, FleetSettings, read_settings

logger = logging.getLogger(__name__)

#: In the private folder, for `doctor`: what went wrong with the remote last, and when.
FAULT_FILE = "remote.fault"


class Fleet:
    """Reads once what was asked for, and says what of it does not count."""

    def __init__(self, private: Path) -> None:
        """Set up; nothing is imported that was not asked for, and nothing is opened."""
        private.mkdir(parents=True, exist_ok=True)
        self._private = private
        self.settings = read_settings(private)
        self.signer, problems = signer_for(private, self.settings)
        self._remote: Remote | None = None
        #: What was asked for and is not done.
        self.problems = [*self.settings.problems, *problems, *remote_problems(self.settings)]
        for problem in self.problems:
            logger.warning("Warmgraph: %s", problem)

    def store(self, root: Path, cap_bytes: Callable[[], int]) -> Store:
        """Return the local store, whose files the signer signs and verifies."""
        return Store(root, self.signer, cap_bytes=cap_bytes, private=self._private)

    def remote(self, store: Store) -> Remote | None:
        """Return the remote store; None where there is to be none, or it cannot be used."""
        if usable(self.settings):
            self._remote = Remote(self.settings, store, self.signer, on_fault=self._keep_fault)
        return self._remote

    def claims(self, store: Store, patience_s: Callable[[], float]) -> Claims:
        """Return who keeps servers, and machines, from building the same; after `remote`."""
        if self._remote is None:
            return Claims(store.root, self.signer, patience_s=patience_s)
        return FleetClaims(
            store.root, self.signer, self._remote, spool=store.spool, patience_s=patience_s
        )

    def report(self) -> dict[str, Any]:
        """Return what reports say of it as JSON-plain data: no address, no credentials."""
        return {
            "remote": None if self._remote is None else self._remote.report(),
            "trusted_keys": [
                {"name": key.name, "fingerprint": fingerprint}
                for fingerprint, key in self.signer.keyring.keys.items()
            ],
            "signs": self.settings.signs,
            "problems": [problem.to_plain() for problem in self.problems],
        }

    def _keep_fault(self, fault: Reason) -> None:
        try:
            text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {fault}\n"
            write_whole(self._private / FAULT_FILE, text.encode())
        except OSError as error:
            logger.debug("The last fault is not kept: %s", error)


def usable(settings: FleetSettings) -> bool:
    """Tell whether there is a remote whose package is installed."""
    return bool(settings.remote) and missing_package(settings.remote) is None


def remote_problems(settings: FleetSettings) -> list[Reason]:
    """Say what of a remote is not done as was asked for."""
    if not settings.remote:
        return []
    if (missing := missing_package(settings.remote)) is not None:
        return [missing]
    scheme = scheme_of(settings.remote)
    if settings.mode == WRITE and not SCHEMES[scheme].writes:
        return [of("remote_only_read", scheme=scheme)]
    return []
