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
from .remotes import PATIENCE_S, TARGET, Machine
from .stores import key_number, put

NUMBERS = itertools.count()
KEY = key_number(1)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "bucket").as_uri()
    return f"memory://claims{next(NUMBERS)}/graphs"


class Claiming(Machine):
    """A machine whose claims are looked at quickly."""

    def __init__(
        self, root: Path, url: str, limit_s: float = 60.0, age_s: float = 300.0, **options: Any
    ) -> None:
        super().__init__(root, url, **options)
        self.claims = FleetClaims(
            self.store.root,
            self.signer,
            self.remote,
            spool=self.store.spool,
            patience_s=lambda: limit_s,
            look_s=0.05,
            age_s=age_s,
        )

    def take(self, key: str = KEY) -> bool:
        """Ask once."""
        return self.claims.take(key, TARGET)

    def claim(self, key: str = KEY, within: float = PATIENCE_S) -> bool:
        """Whether it is this machine's to build, within some seconds; asks as graphs do."""
        until = time.monotonic() + within
        while not (taken := self.take(key)) and time.monotonic() < until:
            time.sleep(0.02)
        return taken


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
    one, other = machines(), machines()
    assert one.claim()
    assert not other.claim(within=1.0)
    one.claims.release(KEY)
    assert other.claim()
    assert other.remote.counts["taken over"] == 0


def test_who_is_about_to_build_has_what_another_machine_built_meanwhile(
    machines: Callable[..., Claiming],
) -> None:
    one, reader, writer = machines(), machines(mode="read"), machines()
    put(one.store, KEY)
    one.push([KEY])
    for each in (reader, writer):
        assert each.claim() and each.has([KEY]) == [True]
        each.claims.release(KEY)


def test_who_waits_has_the_graph_as_soon_as_it_is_sent(machines: Callable[..., Claiming]) -> None:
    one, other = machines(), machines()
    assert one.claim() and not other.take()
    put(one.store, KEY)
    one.push([KEY])
    assert other.claim() and other.has([KEY]) == [True]


def test_a_claim_that_is_old_or_makes_no_sense_is_taken_over(
    machines: Callable[..., Claiming],
) -> None:
    one, other = machines(), machines()
    for number, text in enumerate(("dead {:.0f}", "dead", "dead 1e300", "dead nan", ""), start=1):
        key = key_number(number)
        name = f"{one.signer.fingerprint}/{key}.claim"
        one.remote.place.create(name, text.format(time.time() - 301).encode())
        assert other.claim(key) and other.remote.counts["taken over"] == number
        assert not one.take(key)
    assert not one.claim(within=1.0)  # they are the other's now


def test_who_waits_for_too_long_builds_beside_the_other(
    machines: Callable[..., Claiming],
) -> None:
    one, other = machines(), machines(limit_s=0.5)
    assert one.claim()
    assert other.claim(within=10)


def test_a_machine_that_may_only_read_claims_nothing(machines: Callable[..., Claiming]) -> None:
    one, other = machines(mode="read"), machines()
    assert one.claim() and other.claim()


def test_a_remote_that_hangs_costs_the_patience(
    machines: Callable[..., Claiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machines(patience_s=0.5)
    monkeypatch.setattr(machine.remote.place, "create", lambda *_: threading.Event().wait())
    begun = time.monotonic()
    assert machine.claim(within=10)
    assert 0.4 < time.monotonic() - begun < 5.0 and machine.remote.is_resting


def test_a_place_that_knows_no_claims_keeps_nobody_from_building(
    machines: Callable[..., Claiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machines()

    def unknown(name: str, data: bytes) -> None:
        raise NotImplementedError("IfNoneMatch")

    monkeypatch.setattr(machine.remote.place, "create", unknown)
    assert machine.claim() and not machine.remote.is_resting
    assert machine.claim(key_number(2))


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
    place = machine.remote.place
    create = place.create

    def lost(name: str, data: bytes) -> None:
        create(name, data)
        create(name, data)  # as a client does that makes its request again

    monkeypatch.setattr(place, "create", lost)
    assert machine.claim(within=10)  # not only when it is old
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
    place = machine.remote.place
    with monkeypatch.context() as patched:
        patched.setattr(place, "create", lambda *_: 1 / 0)
        assert machine.claim()
    monkeypatch.setattr(machine.remote, "_rests_until", 0.0)  # a minute later
    assert machine.claim(key_number(2))
    assert place.names(machine.signer.fingerprint) == [f"{key_number(2)}.claim"]


def test_who_does_not_reach_the_place_any_more_builds(
    machines: Callable[..., Claiming], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = machines(), machines()
    assert one.claim() and not other.take()
    monkeypatch.setattr(other.remote.place, "fetch", lambda *_: 1 / 0)
    assert other.claim()
    assert other.remote.is_resting and len(other.faults) == 1
