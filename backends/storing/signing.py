"""The key that tells graph files made on this machine from all others, and those it trusts."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import threading
import time
from pathlib import Path

from ..errors import GraphFileError, console_command
from ..reasons import of
from .files import remove_stale
from .public_keys import SIGNATURE_DIGITS, Keyring

logger = logging.getLogger(__name__)

KEY_FILE = "signing.key"
#: Where our commands look for the key, unless they are told: the user folder of the host around us.
_USER = Path(__file__, "../../../../../user").resolve()
_KEY_BYTES = 32
_UNREAD = of("do_make_readable")
_UNMADE = of("do_let_write")
_NO_KEYS = Keyring()
_PATIENCE_S = 2.0  # how long another process may take between creating its key and writing it


class Signer:
    """Sign and verify text with a secret that lives in one owner-only file.

    The key is made at the first use and is the same for every process that is given the same
    directory. Whoever can read it can make graph files that this machine loads as its own, so the
    directory must not be reachable over HTTP.

    Args:
        directory: The pack's system user directory; made (owner-only) with the key.
        keyring: Keys besides; a private one signs in place of the machine's own.
    """

    def __init__(self, directory: Path, keyring: Keyring = _NO_KEYS) -> None:
        self.path = Path(directory) / KEY_FILE
        self.keyring = keyring
        self._lock = threading.Lock()
        self._key: bytes | None = None

    def sign(self, text: str) -> str:
        """Return the HMAC-SHA256 of `text` as 64 hex digits, or a private key's signature as 128.

        Raises:
            GraphFileError: the key cannot be read or made, or there is none that can sign.
        """
        private = self.keyring.private
        return self._mac(text) if private is None else private.sign(text)

    def verify(self, text: str, signature: str) -> bool:
        """Tell whether this machine's key, or one that it trusts, has signed `text`.

        Raises:
            GraphFileError: the machine's own key cannot be read or made.
        """
        if len(signature) == SIGNATURE_DIGITS:
            return any(key.has_signed(text, signature) for key in self.keyring.keys.values())
        if not self.keyring.has_own or not (self._key or self.path.exists()):
            return False  # no key is made to verify what it cannot have signed
        mine = self._mac(text).encode()
        return hmac.compare_digest(mine, signature.encode("utf-8", "surrogatepass"))

    def is_own(self, fingerprint: object) -> bool:
        """Tell whether a fingerprint names the machine's own key, which nobody else has."""
        return self.keyring.has_own and fingerprint == self._own_fingerprint()

    @property
    def readable(self) -> list[str]:
        """The fingerprints of all keys whose files are used; the one that signs comes first.

        Raises:
            GraphFileError: the machine's own key cannot be read or made.
        """
        keys, own = list(self.keyring.keys), []
        if self.keyring.has_own:
            own.append(self._own_fingerprint())
        return [*keys, *own] if self.keyring.private is not None else [*own, *keys]

    def trust_command(self, folder: Path) -> str:
        """Return what is typed at the server's console to sign a folder's files with this key."""
        user = self.path.absolute().parents[1]
        where = [] if user.resolve() == _USER else ["--user-directory", str(user)]
        return console_command("trust", str(folder.absolute()), *where)

    @property
    def fingerprint(self) -> str:
        """Name the key that signs in messages and manifests: 8 hex digits that do not give it away.

        Raises:
            GraphFileError: the key cannot be read or made, or there is none that can sign.
        """
        private = self.keyring.private
        return self._own_fingerprint() if private is None else private.public.fingerprint

    def _own_fingerprint(self) -> str:
        return hashlib.sha256(self._secret()).hexdigest()[:8]

    def _mac(self, text: str) -> str:
        return hmac.new(self._secret(), text.encode(), hashlib.sha256).hexdigest()

    def _secret(self) -> bytes:
        if not self.keyring.has_own:
            raise GraphFileError(of("only_verifies"))
        with self._lock:
            if self._key is None:
                self._key = self._read_or_make()
            return self._key

    def _read_or_make(self) -> bytes:
        try:
            if not self.path.exists():
                _make_key(self.path)
            key = _read_key(self.path)
        except OSError as error:
            raise GraphFileError(
                of("key_unusable", path=self.path, error=error.strerror or error),
                remedy=_UNREAD if self.path.exists() else _UNMADE,
            ) from error
        remove_stale(self.path.parent)  # drafts of processes that were killed while they wrote
        return key


def _make_key(path: Path) -> None:
    """Create the key file; of two processes at once, one wins and both go on with its key."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = secrets.token_hex(_KEY_BYTES).encode()
    draft = path.with_name(f".{KEY_FILE}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _create(draft, text)
        os.link(draft, path)  # appears whole or not at all, and never replaces another's key
        logger.info("Warmgraph: made a new signing key: %s", path)
    except FileExistsError:
        pass
    except OSError:
        if not draft.exists():  # the disk is full or read-only
            raise
        with contextlib.suppress(FileExistsError):  # a file system without hard links
            _create(path, text)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _create(path: Path, data: bytes) -> None:
    """Write a new file; where that fails, nothing is left of it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _read_key(path: Path) -> bytes:
    """Read the key, waiting a moment for a process that has just created the file."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        text = path.read_bytes().strip()
        if len(text) == 2 * _KEY_BYTES:
            with contextlib.suppress(ValueError):
                key = bytes.fromhex(text.decode("ascii", "replace"))
                keep_to_owner(path)
                return key
        if len(text) >= 2 * _KEY_BYTES or time.monotonic() > deadline:
            raise GraphFileError(
                of("key_bad", path=path, wanted=2 * _KEY_BYTES, count=len(text)),
                remedy=of("do_restore_key"),
            )
        time.sleep(0.02)


def keep_to_owner(path: Path) -> None:
    """Take a key that an operator has copied here away from other accounts of this machine."""
    with contextlib.suppress(OSError):
        if os.name != "posix" or not path.stat().st_mode & 0o077:
            return
        path.chmod(0o600)
        logger.warning("the signing key %s was readable by other accounts; made owner-only", path)
