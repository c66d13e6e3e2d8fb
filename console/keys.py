"""`key` makes, trusts and lists keys that only verify; what it changes is in fleet.json alone."""

from __future__ import annotations

import os
from pathlib import Path

from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.fleet.keys import signer_for
from warmgraph_backends.fleet.settings import FILE, TRUSTED, read_file, read_settings, write_file
from warmgraph_backends.storing.public_keys import (
    PublicKey,
    make_private,
    missing_package,
    parse_keys,
    parse_public,
)

from .output import say, stop

FOLDER = "keys"
_NEXT_START = "ComfyUI reads it at its next start"


def new_key(name: str, private: Path) -> int:
    """Make a key pair, and sign with it on this machine if no other key is set.

    Raises:
        GraphFileError: it cannot be made; the text says why.
    """
    content = read_file(private)
    path = private / FOLDER / f"{name}.private"
    public = make_private(name, path)
    say(f"the private key is {path}: only machines that compile for others may have it")
    if content.get("signing_key_file"):
        say(f"{private / FILE} names another key to sign with; this one signs nothing yet")
    else:
        write_file(private, {"signing_key_file": f"{FOLDER}/{path.name}"})
        say(f"this machine signs with it from now on; {_NEXT_START}")
    say("the public key, for `python cli.py key trust` on each machine that runs:")
    say(public.text)
    return 0


def trust_key(text: str, private: Path) -> int:
    """Use what a public key's owner signs on this machine.

    Raises:
        GraphFileError: it is not a public key, or fleet.json cannot be read or written.
    """
    key, known = parse_public(text), _trusted(private)
    if key in known:
        say(f"already trusted: {key.name} ({key.fingerprint})")
        return 0
    if any(each.name == key.name for each in known):
        return stop(f"another key is trusted as {key.name}: `key revoke {key.name}` comes first")
    path = write_file(private, {"trusted_keys": [each.text for each in (*known, key)]})
    say(f"trusted: {key.name} ({key.fingerprint}), in {path}; {_NEXT_START}")
    say("whatever its owner signs is run here as a program")
    if (missing := missing_package()) is not None:
        say(f"TO DO: {missing}")
        return 1
    _say_environment()
    return 0


def revoke_key(name: str, private: Path) -> int:
    """Stop trusting a key; files that it signed are refused, also those copied here.

    Args:
        name: of the key, or the key itself.
        private: the pack's folder.
    """
    known = _trusted(private)
    left = [key for key in known if name not in (key.name, key.text)]
    if len(left) == len(known):
        return stop(f"{private / FILE} trusts no such key; `key list` says which it does")
    write_file(private, {"trusted_keys": [key.text for key in left]})
    say(f"no longer trusted: {name}; {_NEXT_START}")
    _say_environment()
    return 0


def list_keys(private: Path) -> int:
    """Say which keys this machine has, and what each may do."""
    settings = read_settings(private)
    signer, problems = signer_for(private, settings)
    ring = signer.keyring
    if ring.private is not None:
        public = ring.private.public
        say(f"signs and is trusted: {public.text} ({public.fingerprint})")
    for key in settings.trusted:
        say(f"trusted: {key.text} ({key.fingerprint})")
    if not ring.has_own:
        say("this machine has no key of its own")
    elif signer.path.exists():
        signs = "is trusted here" if ring.private is not None else "signs and is trusted here"
        say(f"this machine's own key {signs}: {signer.path}")
    else:
        say(f"this machine's own key is made when it is needed: {signer.path}")
    problems = [*settings.problems, *problems]
    for problem in problems:
        say(f"TO DO: {problem}")
    return 1 if problems else 0


def _trusted(private: Path) -> tuple[PublicKey, ...]:
    keys = read_file(private).get("trusted_keys", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise GraphFileError(f"{private / FILE}: trusted_keys must be a list of texts in quotes")
    return parse_keys(keys)


def _say_environment() -> None:
    if os.environ.get(TRUSTED, "").strip():
        say(f"{TRUSTED} is set here: a server that has it trusts those keys, and no others")
