"""A store in a bucket, over a real S3 server and the client that people install for it."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.fleet.claims import FleetClaims
from warmgraph_backends.storing.graph_file import file_name
from warmgraph_backends.storing.public_keys import Keyring, make_private, read_private

from .remotes import TARGET, Machine
from .stores import flip, key_number, put

NUMBERS = itertools.count()
KEYS = [key_number(number) for number in range(8)]
USER, SECRET = "AKIAWARMGRAPHTEST", "hunter2-hunter2-hunter2"
Make = Callable[..., Machine]


def options(endpoint: str) -> dict[str, Any]:
    return {"key": USER, "secret": SECRET, "endpoint_url": endpoint}


class Bucket:
    """A bucket of its own, and what a writer may do to it."""

    def __init__(self, endpoint: str) -> None:
        import s3fs

        self.name, self.options = f"bucket{next(NUMBERS)}", options(endpoint)
        self.url = f"s3://{self.name}/graphs"
        self._fs = s3fs.S3FileSystem(skip_instance_cache=True, **self.options)
        self._fs.mkdir(self.name)

    def put(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"{self.name}/graphs/{name}", data)

    def read(self, name: str) -> bytes:
        data: bytes = self._fs.cat_file(f"{self.name}/graphs/{name}")
        return data

    def names(self) -> list[str]:
        self._fs.invalidate_cache()
        return sorted(self._fs.find(f"{self.name}/graphs"))


@pytest.fixture
def bucket(s3_endpoint: str) -> Bucket:
    return Bucket(s3_endpoint)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Machines with the first one's signing key, unless they are given another."""
    made: list[Machine] = []

    def one(url: str, options: dict[str, Any], *, own_key: bool = False, **other: Any) -> Machine:
        key_of = made[0].root if made and not own_key else None
        root = tmp_path / f"m{len(made)}"
        made.append(Machine(root, url, options=options, key_of=key_of, **other))
        return made[-1]

    yield one
    for machine in made:
        machine.remote.close()


def filled(bucket: Bucket, make: Make, **options: Any) -> Machine:
    """A machine that has built eight graphs and sent them."""
    first = make(bucket.url, bucket.options, **options)
    for key in KEYS:
        put(first.store, key)
    first.push(KEYS)
    assert first.remote.counts == {"sent": 8}, first.faults
    return first


def test_a_second_machine_has_everything_within_a_second(bucket: Bucket, make: Make) -> None:
    filled(bucket, make)
    second = make(bucket.url, bucket.options, mode="read")
    begun = time.perf_counter()
    second.mirror()
    took = time.perf_counter() - begun
    assert second.has(KEYS) == [True] * 8 and second.remote.counts == {"found": 8}
    logging.getLogger(__name__).info("eight graphs from a bucket: %.2f s", took)
    assert took < 20  # half a second, where others use both cores


def test_with_another_key_nothing_is_even_downloaded(bucket: Bucket, make: Make) -> None:
    filled(bucket, make)
    other = make(bucket.url, bucket.options, own_key=True)
    other.mirror()
    assert other.look(KEYS) == 8 and other.remote.counts == {} and not other.faults


def test_what_a_writer_of_the_bucket_puts_there_is_never_loaded(
    bucket: Bucket, make: Make, tmp_path: Path
) -> None:
    """Damaged, cut, empty, zeros, renamed, a changed manifest, forged, and one that is well."""
    first = filled(bucket, make)
    mine = first.signer.fingerprint
    stranger = make("memory://nothing", {}, own_key=True)
    good = bucket.read(f"{mine}/{TARGET}/{file_name(KEYS[7])}")
    flipped = tmp_path / "flipped"
    flipped.write_bytes(bucket.read(f"{mine}/{TARGET}/{file_name(KEYS[0])}"))
    flip(flipped, -1)
    forged = put(stranger.store, KEYS[6]).read_bytes()
    forged = forged.replace(stranger.signer.fingerprint.encode(), mine.encode())
    planted = (
        flipped.read_bytes(),
        bucket.read(f"{mine}/{TARGET}/{file_name(KEYS[1])}")[:200],
        b"",
        bytes(500),
        good,
        bucket.read(f"{mine}/{TARGET}/{file_name(KEYS[5])}").replace(b"4.114", b"4.115"),
        forged,
    )
    for key, data in zip(KEYS, planted, strict=False):
        bucket.put(f"{mine}/{TARGET}/{file_name(key)}", data)
    second = make(bucket.url, bucket.options)
    assert second.look(KEYS) == 8
    assert second.has(KEYS) == [False] * 7 + [True]
    assert second.remote.counts == {"found": 1, "refused": 7}
    assert sorted(os.listdir(second.store.root)) == [file_name(KEYS[7])]


def test_who_has_the_public_key_alone_loads_and_sends_nothing_in_its_name(
    bucket: Bucket, make: Make, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.private"
    public = make_private("fleet", path)
    filled(bucket, make, keyring=Keyring(private=read_private(path)))
    ring = Keyring((public,), has_own=False)
    runner = make(bucket.url, bucket.options, own_key=True, keyring=ring)
    assert runner.look(KEYS) == 8 and all(runner.has(KEYS))
    other = Keyring((make_private("other", tmp_path / "other.private"),))
    stranger = make(bucket.url, bucket.options, own_key=True, keyring=other)
    assert stranger.look(KEYS) == 8 and not any(stranger.has(KEYS))
    assert {name.split("/")[2] for name in bucket.names()} == {public.fingerprint}


@pytest.fixture(params=["refuses", "hangs"])
def gone(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Options of a server that refuses, or accepts and never says a word."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if request.param == "refuses":
        listener.close()
    yield options(f"http://127.0.0.1:{port}")
    listener.close()


@pytest.mark.parametrize("count", [1, 100])
def test_a_server_that_is_gone_costs_the_patience_and_a_line(
    make: Make, gone: dict[str, Any], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    machine = make("s3://nowhere/graphs", gone, patience_s=2.0)
    begun = time.monotonic()
    assert machine.look([key_number(number) for number in range(count)]) == count
    assert time.monotonic() - begun < 6.0 and machine.remote.is_resting
    lines = [r.getMessage() for r in caplog.records if "remote" in r.getMessage()]
    assert len(lines) == 1 and "is left alone for 60 s" in lines[0]
    told = caplog.text + str(machine.remote.report()) + str(machine.faults)
    for secret in (USER, SECRET, gone["endpoint_url"], "nowhere"):
        assert secret not in told


def test_who_may_not_write_goes_on_reading(
    bucket: Bucket, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What AWS answers to a role without s3:PutObject, as its client raises it."""
    from botocore.exceptions import ClientError

    first = filled(bucket, make)
    second = make(bucket.url, bucket.options)
    place: Any = second.remote.place

    async def denied(method: str, *arguments: Any, **named: Any) -> Any:
        if method == "put_object":
            from s3fs.errors import translate_boto_error

            answer = {"Error": {"Code": "AccessDenied", "Message": "Access Denied"}}
            raise translate_boto_error(ClientError(answer, "PutObject"))
        return await call(method, *arguments, **named)

    call = place._fs._call_s3
    monkeypatch.setattr(place._fs, "_call_s3", denied)
    put(second.store, key_number(50))
    second.push([key_number(50)])
    assert second.remote.report()["mode"] == "read" and not second.remote.is_resting
    assert second.look(KEYS) == 8 and all(second.has(KEYS)) and not first.faults


def test_of_machines_that_ask_at_once_one_claims(bucket: Bucket, make: Make) -> None:
    machines = [make(bucket.url, bucket.options, own_key=True) for _ in range(4)]
    claims = [
        FleetClaims(
            machine.store.root,
            machines[0].signer,
            machine.remote,
            spool=machine.store.spool,
            patience_s=lambda: 60.0,
            look_s=0.2,
        )
        for machine in machines
    ]
    waiting = list(claims)
    while waiting:  # when one gives up, one of the others builds
        until = time.monotonic() + 30
        while not any(each.take(KEYS[0], TARGET) for each in waiting) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.5)
        (owner,) = [each for each in waiting if each.take(KEYS[0], TARGET)]
        owner.release(KEYS[0])
        waiting.remove(owner)
    for each in claims:
        each.close()
