"""`push`, `pull` and `check-remote`: the store that machines share, from the console."""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from warmgraph_backends.compilers.installed import installed_target
from warmgraph_backends.compilers.registry import COMPILERS
from warmgraph_backends.device.kinds import GPU_TYPES
from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.fleet.keys import signer_for
from warmgraph_backends.fleet.place import StorePlace, TooLargeError, open_place, private_folder
from warmgraph_backends.fleet.remote import MOST_BYTES, Remote, refused
from warmgraph_backends.fleet.schemes import (
    SCHEMES,
    missing_package,
    redacted,
    scheme_of,
    secrets_of,
    told,
    why_not,
)
from warmgraph_backends.fleet.settings import FILE, WRITE, FleetSettings, read_settings
from warmgraph_backends.reasons import of
from warmgraph_backends.storing.graph_file import RefusedFileError, key_of, read_graph, read_header
from warmgraph_backends.storing.manifest import Manifest
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store
from warmgraph_backends.target.target import explain_region, explain_target, target_name

from .output import say, stop

_FINGERPRINT = re.compile(r"[0-9a-f]{8}")
_TARGET = re.compile(r"[0-9a-f]{16}")
_TRIAL = "warmgraph.trial"
_SHOWN = 12
T = TypeVar("T")


class Here(NamedTuple):
    """This machine: what was asked for, its keys and its local store."""

    settings: FleetSettings
    signer: Signer
    store: Store


def machine(private: Path, root: Path, url: str | None) -> Here | int:
    """Return this machine with the remote of fleet.json or another one; a status where that is no
    use.
    """
    settings = read_settings(private)
    signer, problems = signer_for(private, settings)
    for problem in (*settings.problems, *problems):
        say(f"TO DO: {problem}")
    if url is not None:
        if why := why_not(url):
            return stop(f"URL {why}")
        same = scheme_of(url) == scheme_of(settings.remote)
        settings = replace(settings, remote=url, options=settings.options if same else {})
    if not settings.remote:
        return stop(f"name a URL, or give `remote` in {private / FILE}")
    if (missing := missing_package(settings.remote)) is not None:
        return stop(str(missing))
    store = Store(root, signer, cap_bytes=lambda: 1 << 62, private=private)
    return Here(settings, signer, store)


def _remote(here: Here, **changes: str) -> Remote:
    """The remote as a server has it, whose faults are said rather than logged."""
    logging.getLogger(Remote.__module__).addHandler(logging.NullHandler())
    settings = replace(here.settings, **changes)  # type: ignore[arg-type]
    return Remote(settings, here.store, here.signer, on_fault=lambda fault: say(str(fault)))


def push(here: Here) -> int:
    """Send every graph of the local store that this machine's key has signed and that is not there.

    Returns:
        0 when all is there, 1 when anything could not be sent.
    """
    if not SCHEMES[scheme_of(here.settings.remote)].writes:
        return stop(str(of("remote_only_read", scheme=scheme_of(here.settings.remote))))
    fingerprint, asked = here.signer.fingerprint, _Asked(here.settings)
    ours: dict[str, list[Path]] = {}
    for path, _ in here.store.graphs():
        try:
            header = read_header(path)
        except GraphFileError as error:
            say(f"passed over: {error}")
            continue
        if header.data.get("signer") == fingerprint and header.is_signed(here.signer):
            ours.setdefault(target_name(header.data["target"]), []).append(path)
    remote = _remote(here, mode=WRITE)
    were_there = new = 0
    for target, paths in ours.items():
        there = set(asked.names(f"{fingerprint}/{target}"))
        for path in paths:
            if path.name in there:
                were_there += 1
            else:
                new += 1
                remote.push(path, path.name.partition(".")[0], target)
    remote.finish()
    sent = remote.counts["sent"]
    say(f"{sent} sent, {were_there} were there, {new - sent} not sent")
    return 1 if sent < new else 0


def pull(here: Here) -> int:
    """Have what fits this machine in the local store, as its server does when it starts.

    Returns:
        0 when all of that is there, 1 when a file was refused or could not be had.
    """
    targets, others, asked = _targets(), 0, _Asked(here.settings)
    for fingerprint in here.signer.readable:
        for name in asked.targets(fingerprint):
            others += 0 if name in targets else len(asked.graphs(fingerprint, name))
    remote = _remote(here)
    for target in targets:
        remote.mirror(target)
    if not remote.finish() or remote.is_resting:
        return stop("it does not answer any more")
    counts = remote.counts
    say(f"{counts['found']} taken, {others} do not fit this machine, {counts['refused']} refused")
    return 1 if counts["refused"] else 0


def _targets() -> set[str]:
    """The names of this machine's targets, as installed files tell."""
    found = (installed_target(d, each.name) for d in ("cpu", *GPU_TYPES) for each in COMPILERS)
    return {target_name(target) for target in found if target is not None}


def check_remote(here: Here) -> int:
    """Say whether the remote can be read and written, what of it would fit here, and why not.

    Returns:
        0 when all is well, 1 when something is to be done.
    """
    settings, asked = here.settings, _Asked(here.settings)
    say(f"remote: {redacted(settings.remote)}, mode {settings.mode}, {settings.patience_s:g} s")
    begun = time.perf_counter()
    folders = [name for name in asked.names("") if _FINGERPRINT.fullmatch(name)]
    say(f"read in {time.perf_counter() - begun:.2f} s: compiled graphs of {len(folders)} keys")
    if not folders and scheme_of(settings.remote) in ("http", "https"):
        say("a web server that lists no files is asked for each by its name, by a server only")
    bad = not _can_write(here, asked)
    keys, local = here.signer.keyring.keys, list(_local(here))
    for fingerprint in here.signer.readable:
        name = keys[fingerprint].name if fingerprint in keys else "this machine's own"
        bad |= not _look_at(here, asked, fingerprint, f"{name} ({fingerprint})", local)
    others = [name for name in folders if name not in here.signer.readable]
    if others:
        say(f"signed with keys that are not trusted here: {', '.join(others[:_SHOWN])}")
    return 1 if bad else 0


def _can_write(here: Here, asked: _Asked) -> bool:
    """Write a trial file and remove it, where this machine is to write."""
    if here.settings.mode != WRITE:
        return True
    if not SCHEMES[scheme_of(here.settings.remote)].writes:
        say(f"TO DO: {of('remote_only_read', scheme=scheme_of(here.settings.remote))}")
        return False
    try:
        asked(asked.place.write, _TRIAL, b"written by check-remote\n")
        asked(asked.place.remove, _TRIAL)
    except GraphFileError as error:
        say(f"TO DO: it cannot be written: {error}")
        return False
    say("written: yes")
    return True


def _look_at(here: Here, asked: _Asked, fingerprint: str, name: str, local: list[Manifest]) -> bool:
    """Say what lies below a key's name; False where a file is refused."""
    manifests, files = [], 0
    for target in asked.targets(fingerprint):
        for file in asked.graphs(fingerprint, target):
            files += 1
            with private_folder(here.store.spool) as folder:
                draft = folder / file
                try:
                    asked(asked.place.fetch, f"{fingerprint}/{target}/{file}", draft, MOST_BYTES)
                    manifests.append(read_graph(draft, here.signer).manifest)
                except (RefusedFileError, TooLargeError) as error:
                    say(str(refused(file, error)))
    unfit: Counter[str] = Counter()
    for manifest in manifests:
        if lines := _differs(manifest) or _other_region(manifest, local):
            unfit[f"{manifest.kind}: {lines[0]}"] += 1
    here_too = sum(here.store.find(manifest.key) is not None for manifest in manifests)
    say(
        f"{name}: {files} files, {len(manifests) - sum(unfit.values())} fit this machine, "
        f"{here_too} are here"
    )
    for line, count in unfit.most_common(_SHOWN):
        say(f"  {count} x {line}")
    return len(manifests) == files


def _local(here: Here) -> Iterator[Manifest]:
    for path, _ in here.store.graphs():
        try:
            manifest = here.store.read_manifest(path)
        except GraphFileError:
            continue
        if manifest is not None and not _differs(manifest):
            yield manifest


def _differs(manifest: Manifest) -> list[str]:
    """How a graph's target differs from this machine, as installed files tell."""
    facts = manifest.target
    here = installed_target(str(facts.get("device")), str(facts.get("backend")))
    return ["this Python has no PyTorch"] if here is None else [*explain_target(facts, here)]


def _other_region(manifest: Manifest, local: Iterable[Manifest]) -> list[str]:
    """How a graph's region differs from the local store's of the same kind, none of which is it."""
    alike = [each for each in local if each.kind == manifest.kind]
    if not alike or any(each.key == manifest.key for each in alike):
        return []
    return min((list(map(str, explain_region(manifest, each))) for each in alike), key=len)


class _Asked:
    """The place, each call for as long as patience lasts."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self.place: StorePlace = self(open_place, settings.remote, settings.options)

    def __call__(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call something.

        Raises:
            GraphFileError: it failed or took too long.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((call(*arguments), None))
            except Exception as error:  # whatever a library raises
                answers.put((None, error))

        threading.Thread(target=run, name="warmgraph-remote", daemon=True).start()
        patience_s = self._settings.patience_s
        try:
            value, error = answers.get(timeout=patience_s)
        except queue.Empty:
            raise GraphFileError(of("remote_late", seconds=f"{patience_s:g}")) from None
        if isinstance(error, GraphFileError):
            raise error
        if error is not None:
            secrets = secrets_of(self._settings.remote, self._settings.options)
            raise GraphFileError(of("remote_failed", error=told(error, secrets)))
        return value  # type: ignore[no-any-return]

    def names(self, folder: str) -> list[str]:
        """What is in a folder."""
        return self(self.place.names, folder)

    def targets(self, fingerprint: str) -> list[str]:
        """The names of targets below a key's."""
        return [name for name in self.names(fingerprint) if _TARGET.fullmatch(name)]

    def graphs(self, fingerprint: str, target: str) -> list[str]:
        """The names of files below a target's."""
        names = self.names(f"{fingerprint}/{target}")
        return [name for name in names if key_of(Path(name)) is not None]
