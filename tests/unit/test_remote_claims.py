"""Claims in a remote store: of machines that share nothing else, one builds; the others load."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.events import Events
from warmgraph_backends.fleet.claims import FleetClaims
from warmgraph_backends.graphs.compiled_graph import State
from warmgraph_backends.graphs.library import Graphs
from warmgraph_backends.target import keys

from . import saved
from .graphs.places import Answering
from .remotes import PATIENCE_S, Machine
from .stores import key_number

NUMBERS = itertools.count()
KEY = key_number(1)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "bucket").as_uri()
    return f"memory://claims{next(NUMBERS)}/graphs"


class Claiming(Machine):
    """A machine with claims that are renewed and looked at quickly."""

    def __init__(
        self, root: Path, url: str, limit_s: float = 60.0, stale_s: float = 1.0, **options: Any
    ) -> None:
        super().__init__(root, url, **options)
        self.claims = FleetClaims(
            self.store.root,
            self.signer,
            self.remote,
            spool=self.store.spool,
            patience_s=lambda: limit_s,
            poll_s=0.05,
            beat_s=0.2,
            stale_s=stale_s,
        )
        self.told = threading.Event()

    def take(self, key: str = KEY) -> bool:
        """Ask as graphs do: again whenever told to."""
        self.told.clear()
        return self.claims.take(key, self.told.set)

    def claim(self, key: str = KEY, within: float = PATIENCE_S) -> bool:
        """Whether it is this machine's to build, within some seconds."""
        if self.take(key):
            return True
        return self.told.wait(within) and self.take(key)


@pytest.fixture
def machines(tmp_path: Path, url: str) -> Iterator[Callable[..., Claiming]]:
    """Machines with one signing key."""
    made: list[Claiming] = []

    def make(**options: Any) -> Claiming:
        first = made[0].root if made else None
        made.append(Claiming(tmp_path / f"m{len(made)}", url, key_of=first, **options))
        made[0].signer.fingerprint  # its key is made  # noqa: B018
        return made[-1]

    yield make
    for machine in made:
        machine.claims.close()


def test_of_two_machines_one_builds_and_the_other_looks_again_when_it_is_done(
    machines: Callable[..., Claiming],
) -> None:
    one, other = machines(), machines(stale_s=3.0)  # 15 beats: others' work may hold some up
    assert one.claim()
    assert not other.take()
    assert not other.told.wait(4.0)  # it is renewed, so it is not taken over
    one.claims.release(KEY)
    assert other.told.wait(PATIENCE_S)
    assert other.claim()
    assert other.remote.counts["taken over"] == 0


def test_a_dead_machines_claim_is_taken_over_when_its_beats_have_stopped(
    machines: Callable[..., Claiming],
) -> None:
    one, other = machines(), machines()
    place = one.remote.open()
    place.create(f"{one.signer.fingerprint}/{KEY}.claim", b"dead\n")
    begun = time.monotonic()
    assert other.claim()
    assert time.monotonic() - begun >= 1.0 and other.remote.counts["taken over"] == 1


def test_who_waits_for_too_long_builds_beside_the_other(
    machines: Callable[..., Claiming],
) -> None:
    one, other = machines(), machines(limit_s=0.5)
    assert one.claim()
    assert other.claim(within=10)


def test_a_machine_that_may_only_read_claims_nothing(machines: Callable[..., Claiming]) -> None:
    assert machines(mode="read").take()


def test_a_remote_that_hangs_costs_the_patience(
    machines: Callable[..., Claiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machines(patience_s=0.5)
    monkeypatch.setattr(machine.remote.open(), "create", lambda *_: threading.Event().wait())
    begun = time.monotonic()
    assert machine.claim(within=10)
    assert 0.4 < time.monotonic() - begun < 5.0 and machine.remote.is_resting


def test_a_place_that_knows_no_claims_keeps_nobody_from_building(
    machines: Callable[..., Claiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machines()

    def unknown(name: str, data: bytes) -> None:
        raise NotImplementedError("IfNoneMatch")

    monkeypatch.setattr(machine.remote.open(), "create", unknown)
    assert machine.claim() and not machine.remote.is_resting
    assert machine.take(key_number(2))  # not asked again


class Slow(Answering):
    """A builder that takes its time."""

    def submit(self, job: Any) -> Any:
        time.sleep(0.3)
        return super().submit(job)


def test_two_servers_that_want_the_same_graph_build_it_once(
    machines: Callable[..., Claiming],
) -> None:
    servers = []
    for machine in (machines(), machines()):
        builder = Slow()
        graphs = Graphs(
            machine.store,
            builder,  # type: ignore[arg-type]
            machine.claims,
            Events(),
            remote=machine.remote,
        )
        backend: Any = saved.Counting()
        graph = graphs.graph(saved.description(), backend, keys.target("cpu", backend))
        servers.append((graphs, builder, graph))
    for graphs, _, graph in servers:
        graphs.request([graph], [], build=True)
    until = time.monotonic() + PATIENCE_S
    while any(graph.is_pending for _, _, graph in servers) and time.monotonic() < until:
        time.sleep(0.01)
    assert [graph.state for _, _, graph in servers] == [State.READY] * 2
    assert sum(len(builder.jobs) for _, builder, _ in servers) == 1
    assert sorted((graphs.builds, graphs.loads) for graphs, _, _ in servers) == [(0, 1), (1, 0)]
    for graphs, _, _ in servers:
        graphs.close()


def test_a_claim_whose_answer_was_lost_is_known_as_ones_own(
    machines: Callable[..., Claiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machines()
    place = machine.remote.open()
    create = place.create

    def lost(name: str, data: bytes) -> None:
        create(name, data)
        create(name, data)  # as a client does that makes its request again

    monkeypatch.setattr(place, "create", lost)
    assert machine.claim(within=0.8)  # not only when it has gone stale
    assert machine.remote.counts["taken over"] == 0
    machine.claims.release(KEY)
    until = time.monotonic() + PATIENCE_S
    while place.names(machine.signer.fingerprint) and time.monotonic() < until:
        time.sleep(0.01)
    assert place.names(machine.signer.fingerprint) == []


def test_a_claim_that_could_not_be_made_keeps_no_later_one_from_being_made(
    machines: Callable[..., Claiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machines()
    place = machine.remote.open()
    with monkeypatch.context() as patched:
        patched.setattr(place, "create", lambda *_: 1 / 0)
        assert machine.claim()
    monkeypatch.setattr(machine.claims, "_unclaimed_until", time.monotonic())  # a minute later
    assert machine.claim(key_number(2))
    assert place.names(machine.signer.fingerprint) == [f"{key_number(2)}.claim"]


def test_looks_that_fail_make_nobody_build_what_another_machine_builds(
    machines: Callable[..., Claiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machines(), machines()
    assert one.claim() and not other.take()
    place = other.remote.open()
    failed = threading.Semaphore(0)

    def reset(*_: Any) -> None:
        failed.release()
        raise ConnectionResetError("the connection was reset")

    with monkeypatch.context() as patched:
        patched.setattr(place, "fetch", reset)
        assert failed.acquire(timeout=PATIENCE_S) and failed.acquire(timeout=PATIENCE_S)
    assert not other.told.is_set() and not other.remote.is_resting
    one.claims.release(KEY)
    assert other.told.wait(PATIENCE_S)


def test_who_hears_nothing_of_another_machines_claim_builds(
    machines: Callable[..., Claiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machines(), machines()
    assert one.claim()
    monkeypatch.setattr(other.remote.open(), "fetch", lambda *_: 1 / 0)
    begun = time.monotonic()
    assert other.claim()
    assert time.monotonic() - begun >= 1.9 and other.remote.counts["taken over"] == 0
