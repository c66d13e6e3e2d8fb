"""The signer of a machine, with the keys that its owner named."""

from __future__ import annotations

from pathlib import Path

from ..errors import GraphFileError
from ..reasons import Reason
from ..storing.public_keys import Keyring, PrivateKey, missing_package, read_private
from ..storing.signing import Signer, keep_to_owner
from .settings import FleetSettings, read_settings


def signer_for(private: Path, settings: FleetSettings) -> tuple[Signer, list[Reason]]:
    """Return what signs and verifies on this machine, and what of the keys does not count, and why.

    Args:
        private: the pack's folder that no HTTP route reaches.
        settings: what was asked for.
    """
    if not settings.trusted and settings.signing_key_file is None:
        return Signer(private, Keyring(has_own=settings.signs)), []
    if (missing := missing_package()) is not None:
        return Signer(private, Keyring(has_own=settings.signs)), [missing]
    key: PrivateKey | None = None
    problems: list[Reason] = []
    if settings.signing_key_file is not None:
        try:
            keep_to_owner(settings.signing_key_file)
            key = read_private(settings.signing_key_file)
        except GraphFileError as error:
            problems.append(error.told)
    return Signer(private, Keyring(settings.trusted, key, settings.signs)), problems


def signer_of(private: Path) -> Signer:
    """Return what signs and verifies on a machine, for the console; problems are the doctor's."""
    return signer_for(private, read_settings(private))[0]
