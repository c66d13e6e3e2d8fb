"""Keys that only verify: Ed25519, beside the machine's own key (`signing`).

    NAME:64 hex digits           a public key, as it is printed, trusted and listed
    NAME:64 hex digits           a private one, alone in a file that only its owner may read

Who has a public key can use what the private one signed, and can sign nothing. The mathematics are
those of the package `cryptography`, which is imported when a key is there, and not before.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import GraphFileError
from ..reasons import Reason, of
from .files import open_regular

#: Characters of a signature, by which one is told from the machine's own.
SIGNATURE_DIGITS = 128
PACKAGE = "cryptography"
_KEY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9a-f]{64})")
_PURPOSE = b"warmgraph ed25519\n"
_MOST_BYTES = 512
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PublicKey(NamedTuple):
    """A name for people, and the 32 bytes of the key."""

    name: str
    raw: bytes

    @property
    def fingerprint(self) -> str:
        """Name the key in manifests and folders: 8 hex digits."""
        return hashlib.sha256(_PURPOSE + self.raw).hexdigest()[:8]

    @property
    def text(self) -> str:
        """What is passed on to those who are to trust it."""
        return f"{self.name}:{self.raw.hex()}"

    def has_signed(self, text: str, signature: str) -> bool:
        """Tell whether a signature is this key's.

        Raises:
            ImportError: the package is not there.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        with suppress(InvalidSignature, ValueError):
            Ed25519PublicKey.from_public_bytes(self.raw).verify(
                bytes.fromhex(signature), text.encode()
            )
            return True
        return False


@dataclass(frozen=True)
class PrivateKey:
    """What signs for a fleet."""

    public: PublicKey
    _key: Any = field(repr=False)

    def sign(self, text: str) -> str:
        """Return the signature of a text as 128 hex digits."""
        signature: bytes = self._key.sign(text.encode())
        return signature.hex()


class Keyring(NamedTuple):
    """The keys of others that a machine knows.

    Attributes:
        trusted: whose files it uses.
        private: what it signs with in place of its own key; its public half is trusted.
        has_own: whether the machine has a key of its own; without one, and without a private key,
            it can sign nothing.
    """

    trusted: tuple[PublicKey, ...] = ()
    private: PrivateKey | None = None
    has_own: bool = True

    @property
    def keys(self) -> dict[str, PublicKey]:
        """All whose files are used, by fingerprint; the one that signs comes first."""
        own = [] if self.private is None else [self.private.public]
        return {key.fingerprint: key for key in (*own, *self.trusted)}


def missing_package() -> Reason | None:
    """Say what to install where the package is not there; it is not imported."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return None
    return of("package_missing", what="keys", package=PACKAGE, command=install(PACKAGE))


def install(package: str) -> str:
    """Return what is typed to install a package for the Python that runs this."""
    return f"{sys.executable} -m pip install {package}"


def parse_public(text: str) -> PublicKey:
    """Read a public key as it is passed on.

    Raises:
        GraphFileError: it is none.
    """
    words = _KEY.fullmatch(text.strip())
    if words is None:
        raise GraphFileError(of("no_public_key"))
    return PublicKey(words[1], bytes.fromhex(words[2]))


def parse_keys(texts: Sequence[str]) -> tuple[PublicKey, ...]:
    """Read several; what is no key is refused.

    Raises:
        GraphFileError: one of them is none.
    """
    return tuple(map(parse_public, texts))


def read_private(path: Path) -> PrivateKey:
    """Read a private key.

    Raises:
        GraphFileError: the file cannot be read, holds none, or the package is not there.
    """
    if (why := missing_package()) is not None:
        raise GraphFileError(why)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        with open_regular(path) as file:
            text = file.read(_MOST_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise GraphFileError(
            of("key_unusable", path=path, error=error.strerror or error),
            remedy=of("do_make_readable"),
        ) from error
    words = _KEY.fullmatch(text.strip())
    if words is None:
        raise GraphFileError(of("no_private_key", path=path))
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(words[2]))
    return PrivateKey(PublicKey(words[1], key.public_key().public_bytes_raw()), key)


def make_private(name: str, path: Path) -> PublicKey:
    """Make a key pair; the private half is written for its owner alone, and never over another.

    Raises:
        GraphFileError: the name is none, there is such a file, it cannot be written, or the package
            is not there.
    """
    if NAME.fullmatch(name) is None:
        raise GraphFileError(of("bad_key_name"))
    if (why := missing_package()) is not None:
        raise GraphFileError(why)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    seed = secrets.token_bytes(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"{name}:{seed.hex()}\n".encode())
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as error:
        raise GraphFileError(of("key_exists", path=path)) from error
    except OSError as error:
        raise GraphFileError(
            of("file_unwritable", path=path, error=error.strerror or error)
        ) from error
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key()
    return PublicKey(name, public.public_bytes_raw())
