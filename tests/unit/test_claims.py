"""Servers that share a store: one builds each graph, whatever becomes of it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from warmgraph_backends.building import claims
from warmgraph_backends.building.claims import Claims
from warmgraph_backends.sessions.prompts import Prompts
from warmgraph_backends.storing.canonical_json import sha256_hex
from warmgraph_backends.storing.signing import Signer
from warmgraph_tools.by_path import ADOPT, load

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEY = sha256_hex("a graph")
HOLDER = """
import pathlib
from warmgraph_backends.building.claims import Claims
from warmgraph_backends.storing.signing import Signer
root = pathlib.Path(sys.argv[1])
held = Claims(root / "store", Signer(root / "private"), patience_s=lambda: 60.0)
print(held.take(sys.argv[2]), flush=True)
input()
held.release(sys.argv[2])
print("released", flush=True)
input()
"""


@pytest.fixture(scope="module")
def servers() -> ModuleType:
    """The module `claims_server.py`."""
    return load("claims_server", HERE / "claims_server.py")


@pytest.fixture
def serve(servers: ModuleType, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start servers within this process, all over one store."""
    started: list[Any] = []

    def start(**options: Any) -> Any:
        started.append(servers.Server(tmp_path, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start other processes that hold a claim each; a line on their input releases it."""
    started: list[subprocess.Popen[str]] = []

    def start(key: str) -> subprocess.Popen[str]:
        holder = subprocess.Popen(
            [sys.executable, "-c", ADOPT + HOLDER, str(tmp_path), key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(holder)
        assert holder.stdout is not None and holder.stdout.readline() == "True\n"
        return holder

    yield start
    for holder in started:
        holder.kill()
        holder.communicate()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Claims]]:
    """Make the claims of servers in this process."""
    made: list[Claims] = []

    def make_claims(patience_s: float = 60.0, user: str = "private") -> Claims:
        signer = Signer(tmp_path / user)
        made.append(Claims(tmp_path / "store", signer, patience_s=lambda: patience_s))
        return made[-1]

    yield make_claims
    for each in made:
        each.close()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store").glob(".*"))


def built(tmp_path: Path) -> Counter[str]:
    roll = tmp_path / "roll"
    return Counter(roll.read_text().split() if roll.exists() else [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its servers")
def test_servers_on_one_store_build_each_graph_once(tmp_path: Path) -> None:
    kinds = ["one", "two", "three", "four"]
    done = subprocess.run(
        [sys.executable, HERE / "claims_server.py", "4", tmp_path, ",".join(kinds)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["states"] for each in found] == [["ready"] * 4] * 4
    assert [each["said"] for each in found] == [kinds] * 4
    assert built(tmp_path) == Counter(kinds)
    assert sum(each["builds"] for each in found) == 4
    assert files(tmp_path) == []


def test_a_graph_whose_builder_is_killed_is_built_by_who_waits(
    serve, hold, servers: ModuleType, tmp_path: Path
) -> None:
    server = serve()
    key = server.graphs.graph(*servers.describe("one")).key
    holder = hold(key)
    (graph,) = server.want(["one"])
    server.graphs.settle()
    time.sleep(claims.POLL_S + 0.2)
    assert graph.status.elsewhere and graph.is_pending and graph.is_coming
    assert not built(tmp_path)
    holder.kill()
    holder.wait()
    assert servers.settle([graph]) == ["ready"]
    assert built(tmp_path) == {"one": 1} and files(tmp_path) == []


def test_a_build_that_fails_elsewhere_lets_the_next_server_try(
    serve, servers: ModuleType, tmp_path: Path
) -> None:
    bad, good = serve(fails=True), serve()
    bad.builder.pause(True)
    (first,) = bad.want(["one"])
    bad.graphs.settle()
    (second,) = good.want(["one"])
    good.graphs.settle()
    assert second.status.elsewhere
    bad.builder.pause(False)
    assert servers.settle([first, second]) == ["failed", "ready"]
    assert built(tmp_path) == {"one": 2} and files(tmp_path) == []


def test_a_prompt_that_waits_for_graphs_waits_for_those_of_other_servers_and_can_be_cancelled(
    serve, hold, servers: ModuleType
) -> None:
    server = serve()
    holder = hold(server.graphs.graph(*servers.describe("one")).key)
    graphs = server.want(["one"])
    server.graphs.settle()
    said: list[str] = []

    class CancelledError(Exception):
        pass

    def cancel() -> None:
        if said:
            raise CancelledError

    with pytest.raises(CancelledError):
        Prompts(cancel).wait(
            "SDXL", graphs, server.builder, lambda done, total, now: said.append(now.text)
        )
    assert said == ["SDXL: waiting for another server, which compiles for it: 1"]
    assert graphs[0].is_pending
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    Prompts(lambda: None).wait("SDXL", graphs, server.builder, None)
    assert graphs[0].state.value == "ready" and not graphs[0].status.elsewhere


def test_who_waits_longer_than_its_patience_builds_itself(
    serve, hold, servers: ModuleType, tmp_path: Path
) -> None:
    server = serve(patience_s=0.3)
    hold(server.graphs.graph(*servers.describe("one")).key)
    assert servers.settle(server.want(["one"])) == ["ready"]
    assert built(tmp_path) == {"one": 1}
    assert len(files(tmp_path)) == 1  # the other's claim is left to it


def test_without_a_writable_store_graphs_are_built_and_it_is_said_once(
    serve, servers: ModuleType, tmp_path: Path, caplog
) -> None:
    (tmp_path / "store").write_text("no folder")
    server = serve()
    with caplog.at_level(logging.INFO):
        assert servers.settle(server.want(["one", "two"])) == ["ready"] * 2
    said = [r.message for r in caplog.records if "whatever other servers" in r.message]
    assert len(said) == 1 and built(tmp_path) == {"one": 1, "two": 1}


def test_a_graph_that_was_dropped_meanwhile_is_not_built(
    serve, hold, servers: ModuleType, tmp_path: Path
) -> None:
    server = serve()
    holder = hold(server.graphs.graph(*servers.describe("one")).key)
    (graph,) = server.want(["one"])
    server.graphs.settle()
    graph.drop("it was wrong")
    holder.kill()
    holder.wait()
    assert wait_until(lambda: not server.claims._waiting)
    server.graphs.settle()
    assert graph.state.value == "failed" and not graph.status.elsewhere
    assert server.builder.progress().total == 0 and not built(tmp_path)


def test_a_server_that_closes_waits_for_no_other(serve, hold, servers: ModuleType) -> None:
    server = serve()
    hold(server.graphs.graph(*servers.describe("one")).key)
    graphs = server.want(["one"])
    server.graphs.settle()
    server.close()
    assert servers.settle(graphs, 1) == ["missing"]
    assert "closed" in graphs[0].reason and not graphs[0].status.elsewhere


def test_the_second_to_ask_waits_until_the_first_releases(make) -> None:
    first, second = make(), make()
    assert first.take(KEY) and first.take(KEY)
    assert not second.take(KEY) and not second.take(KEY)
    first.release(KEY)
    assert second.take(KEY)


def test_servers_with_different_keys_do_not_wait_for_each_other(make) -> None:
    """Neither can load what the other signs."""
    assert make().take(KEY) and make(user="other").take(KEY)


def test_what_a_file_in_a_claims_place_holds_does_not_matter(make, tmp_path: Path) -> None:
    first = make()
    assert first.take(KEY)
    (claim,) = files(tmp_path)
    first.release(KEY)
    claim.write_bytes(b"\xff\xfe of an older version")
    assert first.take(KEY)
    first.release(KEY)
    assert files(tmp_path) == []


def test_a_folder_or_a_pipe_in_a_claims_place_only_means_that_there_is_none(
    make, tmp_path: Path
) -> None:
    first = make()
    assert first.take(KEY)
    (claim,) = files(tmp_path)
    first.release(KEY)
    claim.mkdir()
    assert first.take(KEY)
    first.release(KEY)
    claim.rmdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(claim)
        assert first.take(KEY)
        first.release(KEY)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root opens any file")
def test_a_file_that_is_closed_to_this_user_means_that_there_is_none(make, tmp_path: Path) -> None:
    first = make()
    assert first.take(KEY)
    (claim,) = files(tmp_path)
    first.release(KEY)
    claim.touch(0)
    assert first.take(KEY)


def test_a_link_in_a_claims_place_is_not_followed(make, tmp_path: Path) -> None:
    first, kept = make(), tmp_path / "kept"
    assert first.take(KEY)
    (claim,) = files(tmp_path)
    first.release(KEY)
    kept.write_text("kept")
    claim.symlink_to(kept)
    assert first.take(KEY)
    first.release(KEY)
    assert kept.read_text() == "kept" and claim.is_symlink()


def test_the_sweep_removes_what_the_dead_left_and_nothing_else(make, tmp_path: Path) -> None:
    first, store = make(), tmp_path / "store"
    assert first.take(KEY)
    (held,) = files(tmp_path)
    (store / f".{sha256_hex('dead')}.00000000.claim").touch()
    (store / "dead.claim").touch()  # not a name of ours
    make().sweep()
    assert sorted(store.iterdir()) == [held, store / "dead.claim"]


def test_closing_releases_what_is_held_and_lets_all_build(make, tmp_path: Path) -> None:
    first, second = make(), make()
    assert first.take(KEY) and not second.take(KEY)
    second.close()
    first.close()
    assert files(tmp_path) == []
    assert second.take(KEY)  # whoever still asks builds


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_of_many_that_wait_for_a_killed_server_one_takes_over(make, hold, tmp_path: Path) -> None:
    holder = hold(KEY)
    waiting = [make() for _ in range(8)]
    assert [each.take(KEY) for each in waiting] == [False] * 8
    holder.kill()
    holder.wait()
    assert sum(each.take(KEY) for each in waiting) == 1
    assert len(files(tmp_path)) == 1
