"""Keys that only verify: who has the public half loads what the private one signed, and signs
nothing in its name.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.fleet.fleet import Fleet
from warmgraph_backends.fleet.settings import FILE, TRUSTED
from warmgraph_backends.storing.graph_file import Fault, RefusedFileError, encode, read_header
from warmgraph_backends.storing.public_keys import (
    Keyring,
    PublicKey,
    make_private,
    parse_public,
    read_private,
)
from warmgraph_backends.storing.signing import KEY_FILE, Signer
from warmgraph_backends.storing.store import BROKEN, Store

from . import saved
from .stores import KEY, key_number, put


def store(root: Path, keyring: Keyring, shared: Path | None = None) -> Store:
    """The store of a machine; several may share a folder."""
    private = root / "user" / "__warmgraph"
    folder = shared or root / "graphs"
    return Store(folder, Signer(private, keyring), cap_bytes=lambda: 1 << 30, private=private)


@pytest.fixture
def builder(tmp_path: Path) -> Store:
    """A machine that signs with a private key."""
    path = tmp_path / "fleet.private"
    make_private("fleet", path)
    return store(tmp_path / "builder", Keyring(private=read_private(path)), tmp_path / "shared")


def public_of(machine: Store) -> PublicKey:
    private = machine._signer.keyring.private
    assert private is not None
    return private.public


def change(path: Path) -> None:
    """Change what a file's manifest says."""
    data = path.read_bytes()
    assert b"4.114" in data
    path.write_bytes(data.replace(b"4.114", b"4.115"))


def loads(machine: Store, key: str = KEY) -> bool:
    try:
        return machine.load(key) is not None
    except GraphFileError:
        return False


def test_the_private_half_is_for_its_owner_and_no_key_is_written_over_another(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys" / "fleet.private"
    public = make_private("fleet", path)
    assert read_private(path).public == public == parse_public(f" {public.text}\n")
    if os.name == "posix":
        assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    with pytest.raises(GraphFileError, match="no key is written over another"):
        make_private("fleet", path)
    assert path.read_bytes() == before
    with pytest.raises(GraphFileError, match="a key's name must be letters"):
        make_private("../x", path)


def test_who_has_the_public_half_alone_loads_and_cannot_sign(
    tmp_path: Path, builder: Store
) -> None:
    path = put(builder)
    ring = Keyring(trusted=(public_of(builder),), has_own=False)
    runner = store(tmp_path / "runner", ring, builder.root)
    assert loads(runner)
    assert not os.path.exists(runner._signer.path)
    with pytest.raises(GraphFileError, match="this machine has no key that signs"):
        encode(saved.manifest(KEY), saved.packed(), runner._signer)
    with pytest.raises(GraphFileError, match="this machine has no key that signs"):
        put(runner, key_number(1))
    assert read_header(path).data["signer"] == public_of(builder).fingerprint


@pytest.mark.parametrize("other", [False, True], ids=["none", "another"])
def test_without_the_public_half_nothing_of_it_loads(
    tmp_path: Path, builder: Store, other: bool
) -> None:
    put(builder)
    trusted = (make_private("other", tmp_path / "other.private"),) if other else ()
    runner = store(tmp_path / "runner", Keyring(trusted), builder.root)
    with pytest.raises(GraphFileError, match="was signed with another key"):
        runner.load(KEY)


def test_a_key_that_is_revoked_refuses_what_was_copied_here_before(
    tmp_path: Path, builder: Store
) -> None:
    draft = put(builder)
    before = store(tmp_path / "runner", Keyring((public_of(builder),)))
    before.take_in(draft)
    assert loads(before)
    assert not loads(store(tmp_path / "runner", Keyring()))


def test_a_file_in_a_trusted_keys_name_that_it_has_not_signed_is_never_taken_for_ours(
    tmp_path: Path, builder: Store
) -> None:
    """Anybody can write the name; only one in the name of the machine's own key was ours."""
    path = put(builder)
    runner = store(tmp_path / "runner", Keyring((public_of(builder),)), builder.root)
    change(path)
    for machine in (runner, builder):
        with pytest.raises(RefusedFileError, match="which has not signed it") as caught:
            machine.load(KEY)
        assert caught.value.fault is Fault.FORGED and "cli.py trust" not in str(caught.value)
        assert path.exists() and not list(builder.root.glob(f"*{BROKEN}"))
    put(runner)  # one of its own beside it
    assert loads(runner) and path.exists()
    own = store(tmp_path / "runner2", Keyring())
    damaged = put(own)
    change(damaged)
    with pytest.raises(RefusedFileError, match="was changed after it was signed"):
        own.load(KEY)
    assert list(own.root.glob(f"*{BROKEN}")) and not damaged.exists()


def test_two_keys_of_one_store_have_a_file_each(tmp_path: Path, builder: Store) -> None:
    shared = builder.root
    machine = store(tmp_path / "m", Keyring((public_of(builder),)), shared)
    stranger = store(tmp_path / "stranger", Keyring(), shared)
    plain = put(stranger)
    ours = put(builder)
    assert ours.parent.name == public_of(builder).fingerprint
    assert loads(machine) and loads(stranger) and loads(builder) and plain.exists()
    elsewhere = store(tmp_path / "n", Keyring((public_of(builder),)), tmp_path / "second")
    put(store(tmp_path / "stranger2", Keyring(), tmp_path / "second"))
    taken = elsewhere.take_in(ours)
    assert taken.parent.name == public_of(builder).fingerprint and loads(elsewhere)


def test_without_the_package_a_line_says_what_to_install_and_all_goes_on(
    tmp_path: Path,
    builder: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(builder)
    private = tmp_path / "runner" / "user" / "__warmgraph"
    monkeypatch.setenv(TRUSTED, public_of(builder).text)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    fleet = Fleet(private)
    assert f"{sys.executable} -m pip install cryptography" in caplog.text
    assert not loads(fleet.store(builder.root, lambda: 1 << 30))
    own = fleet.store(tmp_path / "own", lambda: 1 << 30)
    put(own)
    assert loads(own)
    with pytest.raises(GraphFileError, match="pip install cryptography"):
        make_private("x", tmp_path / "x.private")


def test_a_machine_that_names_a_key_file_signs_with_it(tmp_path: Path) -> None:
    private = tmp_path / "user" / "__warmgraph"
    public = make_private("fleet", private / "keys" / "fleet.private")
    (private / FILE).write_text(json.dumps({"signing_key_file": "keys/fleet.private"}))
    fleet = Fleet(private)
    assert fleet.signer.fingerprint == public.fingerprint and not fleet.problems
    assert not (private / KEY_FILE).exists()
    (private / "keys" / "fleet.private").write_text("nonsense")
    broken = Fleet(private)
    assert "must hold a private key" in broken.problems[0]
    assert broken.signer.fingerprint != public.fingerprint  # its own, as without
