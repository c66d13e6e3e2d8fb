"""A store that machines share: what comes is checked as ever, and nobody waits for long."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from warmgraph_backends.fleet import remote as remotes
from warmgraph_backends.fleet.settings import FleetSettings
from warmgraph_backends.sessions.settings import SETTINGS, Settings
from warmgraph_backends.storing.graph_file import file_name

from .remotes import TARGET, Machine
from .stores import flip, key_number, put

NUMBERS = itertools.count()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "bucket").as_uri()
    return f"memory://bucket{next(NUMBERS)}/graphs"


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    made: list[Machine] = []
    yield made
    for machine in made:
        machine.remote.close()


def two(tmp_path: Path, url: str, machines: list[Machine]) -> tuple[Machine, Machine]:
    """One that has built eight graphs and sent them, and one with the same key and nothing else."""
    first = Machine(tmp_path / "first", url)
    keys = [key_number(number) for number in range(8)]
    for key in keys:
        put(first.store, key)
    first.push(keys)
    second = Machine(tmp_path / "second", url, key_of=first.root)
    machines += [first, second]
    return first, second


KEYS = [key_number(number) for number in range(8)]


def test_what_one_machine_sends_another_has_as_soon_as_it_starts(
    tmp_path: Path, url: str, machines: list[Machine]
) -> None:
    first, second = two(tmp_path, url, machines)
    assert first.remote.counts == {"sent": 8}
    second.mirror()
    assert second.has(KEYS) == [True] * 8
    assert second.remote.counts == {"found": 8} and not second.faults


def test_who_looks_for_a_graph_while_all_come_is_told_when_it_is_there(
    tmp_path: Path, url: str, machines: list[Machine]
) -> None:
    _, second = two(tmp_path, url, machines)
    second.remote.mirror(TARGET)
    assert second.look([*KEYS, key_number(99)]) == 9
    assert second.has(KEYS) == [True] * 8
    assert second.remote.counts == {"found": 8} and not second.faults


def test_a_local_file_that_nobody_trusts_keeps_no_good_one_from_coming(
    tmp_path: Path, url: str, machines: list[Machine]
) -> None:
    _, second = two(tmp_path, url, machines)
    stranger = Machine(tmp_path / "stranger", url)
    machines.append(stranger)
    second.store.root.mkdir(parents=True)
    for key in KEYS[:2]:
        shutil.copy2(put(stranger.store, key), second.store.root)
    assert second.look(KEYS[:1]) == 1 and second.has(KEYS[:1]) == [True]
    second.mirror()
    assert second.has(KEYS) == [True] * 8


def test_what_was_made_for_another_target_does_not_come(
    tmp_path: Path, url: str, machines: list[Machine]
) -> None:
    _, second = two(tmp_path, url, machines)
    second.remote.mirror("f" * 16)
    assert second.remote.finish() and not any(second.has(KEYS))


def test_a_full_store_takes_what_is_asked_for_alone(
    tmp_path: Path, url: str, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = two(tmp_path, url, machines)
    monkeypatch.setattr(second.store, "_cap_bytes", lambda: 0)
    second.mirror()
    assert second.has(KEYS) == [False] * 8
    assert second.look(KEYS[:1]) == 1 and second.has(KEYS) == [True] + [False] * 7


def test_one_that_is_not_there_is_not_asked_for_again_at_once(
    tmp_path: Path, url: str, machines: list[Machine]
) -> None:
    first, second = two(tmp_path, url, machines)
    late = key_number(99)
    assert second.look([late, KEYS[0]]) == 2
    put(first.store, late)
    first.push([late])
    assert second.look([late]) == 0 and second.has([late]) == [False]
    assert second.remote.take(late, TARGET) and second.has([late]) == [True]


def test_what_came_after_it_was_missed_is_had_soon_and_what_never_comes_is_asked_for_ever_less(
    tmp_path: Path, url: str, machines: list[Machine]
) -> None:
    first, second = two(tmp_path, url, machines)
    late, never = key_number(99), key_number(98)
    settings = FleetSettings(url)
    second.remote.close()
    second.remote = remotes.Remote(settings, second.store, second.signer, missed_s=0.1)
    begun, asked = time.monotonic(), second.look([late, never])
    put(first.store, late)
    first.push([late])
    while time.monotonic() - begun < 2.0:
        asked += second.look([never])
        time.sleep(0.01)
    assert second.look([late]) == 1 and second.has([late]) == [True]
    assert 4 <= asked <= 7  # at 0, 0.1, 0.3, 0.7 and 1.5 seconds, and the one that came


def test_what_is_damaged_forged_renamed_or_not_signed_here_is_told_and_never_kept(
    tmp_path: Path, machines: list[Machine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    bucket = tmp_path / "bucket"
    first, second = two(tmp_path, bucket.as_uri(), machines)
    folder = bucket / first.signer.fingerprint / TARGET
    files = [folder / file_name(key) for key in KEYS]
    stranger = Machine(tmp_path / "stranger", bucket.as_uri())
    machines.append(stranger)
    flip(files[0], -1)  # its payload
    files[1].write_bytes(files[1].read_bytes()[:100])
    files[2].write_bytes(b"")
    files[3].write_bytes(bytes(1000))
    files[4].write_bytes(files[7].read_bytes())
    flip(files[5], 200)  # its manifest
    files[6].write_bytes(put(stranger.store, KEYS[6]).read_bytes())
    assert second.look(KEYS) == 8
    assert second.has(KEYS) == [False] * 7 + [True]
    assert second.remote.counts == {"found": 1, "refused": 7}
    assert os.listdir(second.store.root) == [file_name(KEYS[7])]
    told = caplog.text
    assert told.count("a file of the remote store is not used: ") == 7
    assert f"{file_name(KEYS[0])} is damaged: " in told
    assert "holds " in told and "which is not what its name says" in told
    assert "was signed with another key" in told and "`python cli.py key trust KEY`" in told
    assert "cli.py trust " not in told and "incoming-" not in told and str(tmp_path) not in told


def test_what_is_larger_than_any_graph_does_not_fill_the_disk(
    tmp_path: Path, url: str, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = two(tmp_path, url, machines)
    monkeypatch.setattr(remotes, "MOST_BYTES", 500)
    assert second.look(KEYS) == 8
    assert second.remote.counts == {"refused": 8}
    assert "is larger than a compiled graph can be" in second.faults[0]
    assert os.listdir(second.store.spool) == []


def test_a_place_that_takes_no_files_is_still_read(
    tmp_path: Path, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = two(tmp_path, (tmp_path / "bucket").as_uri(), machines)

    def denied(name: str, data: bytes) -> None:
        raise PermissionError("403: https://user:secret@there/bucket says no")

    monkeypatch.setattr(second.remote.place, "write", denied)
    put(second.store, key_number(50))
    second.push([key_number(50)])
    assert second.remote.report()["mode"] == "read" and not second.remote.is_resting
    assert "could not be sent to the remote store" in second.faults[0]
    assert "secret" not in second.faults[0] and "there" not in second.faults[0]
    assert second.look(KEYS) == 8 and all(second.has(KEYS))


@pytest.mark.parametrize("count", [1, 100])
def test_a_remote_that_hangs_costs_the_patience_once_and_its_late_answers_still_come(
    tmp_path: Path, machines: list[Machine], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    url = (tmp_path / "bucket").as_uri()
    two(tmp_path, url, machines)
    slow = Machine(tmp_path / "slow", url, key_of=tmp_path / "first", patience_s=1.0)
    machines.append(slow)
    place, goes_on = slow.remote.place, threading.Event()
    fetch = type(place).fetch

    def hang(*arguments: object) -> None:
        goes_on.wait()
        fetch(place, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(place, "fetch", hang)
    begun = time.monotonic()
    assert slow.look([key_number(number) for number in range(count)]) == count
    assert 0.9 < time.monotonic() - begun < 3.0
    assert slow.remote.is_resting and len(slow.faults) == 1
    assert "did not answer within 1 s" in slow.faults[0]
    assert slow.look([key_number(500)]) == 0  # it is left alone
    goes_on.set()
    assert slow.comes(KEYS[0])


def test_a_machine_that_may_only_read_sends_nothing(
    tmp_path: Path, url: str, machines: list[Machine]
) -> None:
    first = Machine(tmp_path / "first", url, mode="read")
    machines.append(first)
    put(first.store, KEYS[0])
    first.push(KEYS[:1])
    assert first.remote.counts == {} and not (tmp_path / "bucket").exists()


def test_an_address_and_what_opens_it_are_in_no_word_of_a_report(
    tmp_path: Path, machines: list[Machine]
) -> None:
    options = {"key": "AKIA-user", "secret": "hunter2-hunter2", "client_kwargs": {"x": ["token-y"]}}
    machine = Machine(tmp_path / "m", "https://me:pass@host.example/graphs", options=options)
    machines.append(machine)
    text = "no https://me:pass@host.example/graphs for hunter2-hunter2, token-y, me:pass, AKIA-user"
    machine.remote.fail(OSError(text))
    told = str(machine.remote.report()) + str(machine.faults) + repr(machine.remote._settings)
    for secret in ("host.example", "hunter2", "token-y", "pass@", "me:pass", "AKIA"):
        assert secret not in told


def test_a_plain_web_server_is_read_and_nothing_is_sent_there(
    tmp_path: Path, machines: list[Machine]
) -> None:
    bucket = tmp_path / "bucket"
    first, _ = two(tmp_path, bucket.as_uri(), machines)
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            asked.append(str(self.command))

    handler = partial(Handler, directory=str(bucket))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://me:hunter2@127.0.0.1:{server.server_port}"
        web = Machine(tmp_path / "web", url, key_of=first.root)
        machines.append(web)
        assert web.look([*KEYS, key_number(99)]) == 9
        assert all(web.has(KEYS)) and web.remote.counts == {"found": 8}
        web.push(KEYS[:1])
        server.shutdown()
    assert set(asked) == {"GET"} and web.remote.report()["mode"] == "read"


def test_of_many_files_that_lie_a_few_are_told(
    tmp_path: Path, machines: list[Machine], caplog: pytest.LogCaptureFixture
) -> None:
    bucket = tmp_path / "bucket"
    first, second = two(tmp_path, bucket.as_uri(), machines)
    keys = [key_number(number) for number in range(100)]
    for key in keys:
        (bucket / first.signer.fingerprint / TARGET / file_name(key)).write_bytes(b"x" * 100)
    assert second.look(keys) == 100 and not any(second.has(keys))
    assert second.remote.counts == {"refused": 100}
    assert caplog.text.count("a file of the remote store is not used") == remotes.SAID


def test_nothing_but_its_owner_says_where_it_is_and_whose_keys_count(tmp_path: Path) -> None:
    """No setting has such a name, and what nodes and routes are made of cannot change the file."""
    with pytest.raises(ValueError, match="remote"):
        Settings(tmp_path).update({"remote": "s3://x"})
    assert not {*SETTINGS} & {"remote", "mode", "options", "trusted_keys", "signing_key_file"}
    root = Path(__file__).parents[2]
    names = ("write_file", "make_private", "FleetSettings(")
    folders = ("backends", "nodes", "console")
    assert {
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if any(name in path.read_text("utf-8") for name in names)
    } == {"backends/fleet/settings.py", "backends/storing/public_keys.py", "console/keys.py"}


def test_what_may_not_be_read_counts_as_missing_and_is_told_once(
    tmp_path: Path, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 says so of every file that is not there, to who may not list the bucket."""
    _, second = two(tmp_path, (tmp_path / "bucket").as_uri(), machines)

    def denied(*_: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(second.remote.place, "fetch", denied)
    assert second.look(KEYS) == 8 and not second.remote.is_resting
    assert len(second.faults) == 1 and "PermissionError: Access Denied" in second.faults[0]


def test_where_nothing_may_be_listed_each_graph_is_asked_for_by_its_name(
    tmp_path: Path, machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = two(tmp_path, (tmp_path / "bucket").as_uri(), machines)

    def denied(_: str) -> list[str]:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(second.remote.place, "names", denied)
    second.remote.mirror(TARGET)
    assert second.look(KEYS[:2]) == 2 and second.has(KEYS[:3]) == [True, True, False]
    assert second.look(KEYS[2:]) == 6 and all(second.has(KEYS))
    assert len(second.faults) == 1
