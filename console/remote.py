"""`push`, `pull` and `check-remote`: the store that machines share, from the console."""

from __future__ import annotations

import queue
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from warmgraph_backends.compilers.installed import installed_target
from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.fleet.crew import Crew
from warmgraph_backends.fleet.keys import signer_for
from warmgraph_backends.fleet.place import Place, open_place, private_folder
from warmgraph_backends.fleet.remote import MOST_BYTES, refused
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
from warmgraph_backends.storing.graph_file import key_of, read_graph, read_header
from warmgraph_backends.storing.manifest import Manifest
from warmgraph_backends.storing.signing import Signer
from warmgraph_backends.storing.store import Store
from warmgraph_backends.target.target import explain_region, explain_target

from .output import say, stop

_FINGERPRINT_DIGITS = 8
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


def push(here: Here) -> int:
    """Send every graph of the local store that this machine's key has signed and that is not there.

    Returns:
        0 when all is there, 1 when anything could not be sent.
    """
    if not SCHEMES[scheme_of(here.settings.remote)].writes:
        return stop(str(of("remote_only_read", scheme=scheme_of(here.settings.remote))))
    fingerprint, calls = here.signer.fingerprint, _Calls(here.settings)
    ours = []
    for path, _ in here.store.graphs():
        try:
            header = read_header(path)
        except GraphFileError as error:
            say(f"passed over: {error}")
            continue
        if header.data.get("signer") == fingerprint and header.is_signed(here.signer):
            ours.append(path)
    there = set(calls.one(calls.place.names, fingerprint))
    new = [path for path in ours if path.name not in there]

    def send(path: Path) -> None:
        calls.place.write(f"{fingerprint}/{path.name}", path.read_bytes())

    outcomes = Counter(outcome is None for outcome in calls.many(send, new))
    say(f"{outcomes[True]} sent, {len(ours) - len(new)} were there, {outcomes[False]} not sent")
    return 1 if outcomes[False] else 0


def pull(here: Here) -> int:
    """Have what fits this machine in the local store.

    Returns:
        0 when all of that is there, 1 when a file was refused or could not be had.
    """
    calls = _Calls(here.settings)
    lists = [(name, calls.one(calls.place.names, name)) for name in here.signer.readable]
    wanted = [
        f"{fingerprint}/{name}"
        for fingerprint, names in lists
        for name in names
        if (key := key_of(Path(name))) is not None and here.store.find(key) is None
    ]
    counts: Counter[str] = Counter()

    def fetch(name: str) -> str:
        with private_folder(here.store.spool) as folder:
            draft = _fetched(calls.place, name, folder)
            manifest = read_graph(draft, here.signer).manifest
            if _differs(manifest):
                return "does not fit"
            here.store.take_in(draft)
            return "taken"

    for outcome in calls.many(fetch, wanted):
        counts[outcome or "failed"] += 1
    say(
        f"{counts['taken']} taken, {counts['does not fit']} do not fit this machine, "
        f"{counts['failed']} refused"
    )
    return 1 if counts["failed"] else 0


def check_remote(here: Here) -> int:
    """Say whether the remote can be read and written, what of it would fit here, and why not.

    Returns:
        0 when all is well, 1 when something is to be done.
    """
    settings, calls = here.settings, _Calls(here.settings)
    say(f"remote: {redacted(settings.remote)}, mode {settings.mode}, {settings.patience_s:g} s")
    begun = time.perf_counter()
    folders = [
        name
        for name in calls.one(calls.place.names, "")
        if len(name) == _FINGERPRINT_DIGITS and not set(name) - set("0123456789abcdef")
    ]
    say(f"read in {time.perf_counter() - begun:.2f} s: compiled graphs of {len(folders)} keys")
    if not folders and scheme_of(settings.remote) in ("http", "https"):
        say("a web server that lists no files is asked for each by its name, by a server only")
    bad = not _can_write(here, calls)
    keys, local = here.signer.keyring.keys, list(_local(here))
    for fingerprint in here.signer.readable:
        name = keys[fingerprint].name if fingerprint in keys else "this machine's own"
        bad |= not _look_at(here, calls, fingerprint, f"{name} ({fingerprint})", local)
    others = [name for name in folders if name not in here.signer.readable]
    if others:
        say(f"signed with keys that are not trusted here: {', '.join(others[:_SHOWN])}")
    return 1 if bad else 0


def _can_write(here: Here, calls: _Calls) -> bool:
    """Write a trial file and remove it, where this machine is to write."""
    if here.settings.mode != WRITE:
        return True
    if not SCHEMES[scheme_of(here.settings.remote)].writes:
        say(f"TO DO: {of('remote_only_read', scheme=scheme_of(here.settings.remote))}")
        return False
    try:
        calls.one(calls.place.write, _TRIAL, b"written by check-remote\n")
        calls.one(calls.place.remove, _TRIAL)
    except GraphFileError as error:
        say(f"TO DO: it cannot be written: {error}")
        return False
    say("written: yes")
    return True


def _look_at(here: Here, calls: _Calls, fingerprint: str, name: str, local: list[Manifest]) -> bool:
    """Say what lies below a key's name; False where a file is refused."""
    files = [f for f in calls.one(calls.place.names, fingerprint) if key_of(Path(f)) is not None]

    def read(file: str) -> Manifest:
        with private_folder(here.store.spool) as folder:
            draft = _fetched(calls.place, f"{fingerprint}/{file}", folder)
            return read_graph(draft, here.signer).manifest

    found = list(calls.many(read, files))
    manifests = [each for each in found if each is not None]
    unfit: Counter[str] = Counter()
    for manifest in manifests:
        if lines := _differs(manifest) or _other_region(manifest, local):
            unfit[f"{manifest.kind}: {lines[0]}"] += 1
    here_too = sum(here.store.find(manifest.key) is not None for manifest in manifests)
    say(
        f"{name}: {len(files)} files, {len(manifests) - sum(unfit.values())} fit this machine, "
        f"{here_too} are here"
    )
    for line, count in unfit.most_common(_SHOWN):
        say(f"  {count} x {line}")
    return len(manifests) == len(found)


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


def _fetched(place: Place, name: str, folder: Path) -> Path:
    draft = folder / name.rpartition("/")[2]
    place.fetch(name, draft, MOST_BYTES)
    return draft


class _Calls:
    """Calls of a place that may hang, each for as long as patience lasts."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self._secrets = secrets_of(settings.remote, settings.options)
        self._crew = Crew()
        weakref.finalize(self, self._crew.close)
        self.place: Place = self.one(open_place, settings.remote, settings.options)

    def one(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call something.

        Raises:
            GraphFileError: it failed or took too long.
        """
        ((_, value, error),) = self._called([partial(call, *arguments)])
        if error is not None:
            raise self._words(error)
        return value  # type: ignore[no-any-return]

    def many(self, call: Callable[[str | Path], T], names: Iterable[Any]) -> Iterator[T | None]:
        """Call something for each name at once, and say what failed; None in its place.

        Raises:
            GraphFileError: nothing comes any more.
        """
        names = list(names)
        for at, value, error in self._called([partial(call, name) for name in names]):
            if error is not None:
                name = str(names[at]).rpartition("/")[2]
                ours = isinstance(error, GraphFileError)
                say(str(refused(name, error)) if ours else f"{name}: {self._words(error)}")
            yield None if error is not None else value

    def _called(
        self, calls: list[Callable[[], Any]]
    ) -> Iterator[tuple[int, Any, BaseException | None]]:
        done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

        def run(at: int, call: Callable[[], Any]) -> None:
            try:
                done.put((at, call(), None))
            except Exception as error:  # whatever a library raises
                done.put((at, None, error))

        for at, call in enumerate(calls):
            self._crew.put(partial(run, at, call))
        for _ in calls:
            try:
                yield done.get(timeout=self._settings.patience_s)
            except queue.Empty:
                late = of("remote_late", seconds=f"{self._settings.patience_s:g}")
                raise GraphFileError(late) from None

    def _words(self, error: BaseException) -> GraphFileError:
        return GraphFileError(of("remote_failed", error=told(error, self._secrets)))
