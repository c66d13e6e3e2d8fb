"""A build farm over TCP: who builds what, and who does when somebody is gone."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.builder import Builder, BuildResult, Job
from warmgraph_backends.building.farm import FarmBuilder, connect
from warmgraph_backends.building.farm_messages import built, read
from warmgraph_backends.errors import CancelledBuildError
from warmgraph_backends.storing.graph_file import compress_payload
from warmgraph_tools.by_path import ADOPT
from warmgraph_tools.farm import Farm

from ..workers import lives, wait_until
from .jobs import error_of, job, result_of

WORKER = Path(__file__).with_name("farm_worker.py")
BACKENDS = Path(__file__).resolve().parents[3] / "backends"


class Asker:
    """A server that asks a farm, with a builder of its own.

    Attributes:
        builder: what its callers have.
        local: builds here.
    """

    def __init__(self, farm: Farm, local: Builder, **options: Any) -> None:
        self.local = local
        self.builder = FarmBuilder(
            connect(farm.address),
            local,
            hello={"argv": ["main.py"], "pretended": None},
            time_limit_s=lambda: 60.0,
            **options,
        )

    def submit(self, *jobs: Job) -> list[Any]:
        return [self.builder.submit(each) for each in jobs]

    def running(self) -> set[str]:
        return set(self.builder.progress().running)

    def at_farm(self) -> int:
        """Jobs that the scheduler has for its workers."""
        return sum(map(len, self.builder._client.processing().values()))

    @property
    def built_here(self) -> int:
        """Jobs that its own builder got."""
        return self.local._number


def graph_job(do: str, **task: Any) -> Job:
    """A job whose graph is for a processor."""
    return job(do, description={"device": "cpu"}, backend="inductor", **task)


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    """A scheduler without workers."""
    farm = Farm(tmp_path / "farm")
    yield farm
    farm.stop()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """A farm with a worker, for tests that leave both as they are."""
    farm = Farm(tmp_path_factory.mktemp("one") / "farm")
    add(farm, "a")
    yield farm
    farm.stop()


def add(farm: Farm, *names: str, backends: Path = BACKENDS) -> None:
    for name in names:
        farm.add(name, command=(WORKER, "--backends", backends))


@pytest.fixture
def ask(make: Callable[..., Builder]) -> Iterator[Callable[..., Asker]]:
    """`ask(farm, nobody_s=...)`: a server; it goes when the test is over."""
    askers: list[Asker] = []

    def make_asker(farm: Farm, **options: Any) -> Asker:
        askers.append(Asker(farm, make(), **options))
        return askers[-1]

    yield make_asker
    for asker in askers:
        asker.builder.close()


def pid_of(result: BuildResult) -> int:
    return int(result.facts["pid"])


def who_builds(farm: Farm) -> list[str]:
    return [name for name in farm.workers if farm.begun(name)]


def endless(tmp_path: Path) -> tuple[Job, Callable[[], list[int]]]:
    """A job that never ends, and what tells its process and its compiler once it has begun."""
    file = tmp_path / "pids"

    def pids() -> list[int]:
        text = file.read_text() if file.exists() else ""
        return [int(word) for word in text.split()[:2]]

    return graph_job("start_compiler", pid_file=str(file)), pids


def test_two_workers_share_the_jobs_and_what_they_built_arrives(
    farm: Farm, ask: Callable[..., Asker], tmp_path: Path
) -> None:
    add(farm, "a", "b")
    asker, end = ask(farm), tmp_path / "end"
    jobs = [graph_job("wait", until=str(end), payload=f"graph {n}") for n in range(3)]
    futures = asker.submit(*jobs)
    assert asker.submit(jobs[0])[0] is futures[0]  # the same key is the same job
    assert wait_until(lambda: len(asker.running()) == 2)
    progress = asker.builder.progress()
    assert (progress.done, progress.total, progress.workers) == (0, 3, 2)
    assert asker.running() < {each.label for each in jobs}
    end.touch()
    results = [result_of(each) for each in futures]
    assert [read_text(each) for each in results] == ["graph 0", "graph 1", "graph 2"]
    assert [each.key for each in results] == [each.key for each in jobs]
    assert len({pid_of(each) for each in results}) == 2  # of two machines
    assert who_builds(farm) == ["a", "b"]
    assert asker.built_here == 0
    assert asker.builder.progress().done == 3


def read_text(result: BuildResult) -> str:
    from warmgraph_backends.storing.graph_file import unpack_payload

    return unpack_payload(result.payload).decode()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_ends_in_mid_build_leaves_its_job_to_the_other_and_nothing_else(
    farm: Farm, ask: Callable[..., Asker], tmp_path: Path, number: signal.Signals
) -> None:
    add(farm, "a", "b")
    asker, end, pids = ask(farm), tmp_path / "end", tmp_path / "pids"
    (future,) = asker.submit(graph_job("wait", until=str(end), pid_file=str(pids)))
    assert wait_until(pids.exists)
    (name,) = who_builds(farm)
    pid = int(pids.read_text())
    farm.end(name, number)
    assert wait_until(lambda: not lives(pid))
    (other,) = farm.workers
    assert wait_until(lambda: farm.begun(other) == 1)
    end.touch()
    assert pid_of(result_of(future)) != pid
    assert asker.built_here == 0
    farm.stop()
    assert wait_until(lambda: farm.left() == []), farm.left()


def test_a_cancel_ends_what_runs_and_what_waits_and_the_workers_go_on(
    one: Farm, ask: Callable[..., Asker], tmp_path: Path
) -> None:
    before = one.begun("a")
    asker, (never, pids) = ask(one), endless(tmp_path)
    (running,) = asker.submit(never)
    assert wait_until(lambda: len(pids()) == 2)
    (waiting,) = asker.submit(graph_job("sleep"))
    asker.builder.pause(True)
    assert asker.builder.progress().paused
    assert asker.builder.cancel() == 2
    assert isinstance(error_of(running), CancelledBuildError)
    assert waiting.cancelled()
    assert wait_until(lambda: not any(map(lives, pids())))
    assert not asker.builder.progress().paused  # a cancel ends it
    (after,) = asker.submit(graph_job("sleep"))
    assert pid_of(result_of(after)) not in pids()
    assert (asker.built_here, one.begun("a") - before) == (0, 2)


def test_a_future_that_is_cancelled_while_it_waits_is_not_built(
    one: Farm, ask: Callable[..., Asker], tmp_path: Path
) -> None:
    before = one.begun("a")
    asker, end = ask(one), tmp_path / "end"
    (first,) = asker.submit(graph_job("wait", until=str(end)))
    assert wait_until(lambda: bool(asker.running()))
    (second,) = asker.submit(graph_job("sleep"))
    assert not first.cancel()  # it runs
    assert second.cancel()
    end.touch()
    result_of(first)
    (third,) = asker.submit(graph_job("sleep"))
    result_of(third)
    assert one.begun("a") - before == 2


def test_a_pause_holds_back_what_waits(
    one: Farm, ask: Callable[..., Asker], tmp_path: Path
) -> None:
    before = one.begun("a")
    asker, end = ask(one), tmp_path / "end"
    first, second = asker.submit(*(graph_job("wait", until=str(end)) for _ in range(2)))
    assert wait_until(lambda: bool(asker.running()))
    asker.builder.pause(True)
    assert wait_until(lambda: asker.at_farm() == 1)  # the farm is told a moment later
    end.touch()
    assert wait_until(lambda: first.done() or second.done())
    (third,) = asker.submit(graph_job("sleep"))
    with pytest.raises(TimeoutError):
        third.result(1.0)
    assert one.begun("a") - before == 1
    asker.builder.pause(False)
    for each in (first, second, third):
        result_of(each)


def test_what_the_scheduler_takes_along_is_built_here_unless_it_was_cancelled(
    farm: Farm, ask: Callable[..., Asker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(farm, "a")
    asker, end = ask(farm), tmp_path / "end"
    running, waiting = asker.submit(*(graph_job("wait", until=str(end)) for _ in range(2)))
    assert wait_until(lambda: bool(asker.running()))
    farm.kill_scheduler()
    assert wait_until(lambda: asker.built_here == 2)
    end.touch()
    result_of(running), result_of(waiting)
    (later,) = asker.submit(graph_job("sleep"))
    result_of(later)
    assert asker.built_here == 3
    assert f"Build farm {farm.address}: what it was asked for is built here" in caplog.text
    farm.workers.pop("a").wait(60)  # a worker without a scheduler ends
    assert wait_until(lambda: farm.left() == [])


def test_a_worker_of_another_version_refuses_in_words_and_others_build(
    farm: Farm, ask: Callable[..., Asker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other" / "backends"
    shutil.copytree(BACKENDS, other, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(BACKENDS.parent / "locales", other.parent / "locales")
    with (other / "worker" / "export.py").open("a") as file:
        file.write("\n_ANOTHER = 1\n")
    add(farm, "other", backends=other)
    asker = ask(farm)
    (here,) = asker.submit(graph_job("sleep"))
    result_of(here)
    assert (asker.built_here, farm.begun("other")) == (1, 0)
    words = "a machine of the build farm is not like this one: made by another version of Warmgraph"
    assert words in caplog.text
    add(farm, "same")
    for each in (asker, ask(farm)):  # one that knows who is unlike, and one that is told
        for future in each.submit(*(graph_job("sleep") for _ in range(2))):
            result_of(future)
    assert (asker.built_here, each.built_here) == (1, 0)
    assert (farm.begun("same"), farm.begun("other")) == (4, 0)


def test_a_farm_without_workers_is_not_waited_for(farm: Farm, ask: Callable[..., Asker]) -> None:
    asker = ask(farm, nobody_s=1.0)
    (future,) = asker.submit(graph_job("sleep"))
    result_of(future)
    assert asker.built_here == 1


def test_a_build_that_fails_says_why_as_one_of_here_does_and_is_not_tried_again(
    one: Farm, ask: Callable[..., Asker]
) -> None:
    asker = ask(one)
    (future,) = asker.submit(graph_job("fail"))
    error = error_of(future)
    assert error.reason == "ValueError: the compiler is unhappy"
    assert "builder_worker.py" in str(error.__cause__)
    assert asker.built_here == 0


def test_a_build_process_that_dies_there_is_tried_once_more_here(
    one: Farm, ask: Callable[..., Asker]
) -> None:
    asker = ask(one)
    (future,) = asker.submit(graph_job("die"))
    assert error_of(future).reason.key == "worker_died"
    assert asker.built_here == 1


def test_what_is_no_graph_is_done_here(one: Farm, ask: Callable[..., Asker]) -> None:
    before = one.begun("a")
    asker = ask(one)
    (future,) = asker.submit(job("sleep"))
    result_of(future)
    assert (asker.built_here, one.begun("a") - before) == (1, 0)


def test_a_server_that_goes_leaves_no_build_behind(
    one: Farm, ask: Callable[..., Asker], tmp_path: Path
) -> None:
    asker, (never, pids) = ask(one), endless(tmp_path)
    (future,) = asker.submit(never)
    assert wait_until(lambda: len(pids()) == 2)
    asker.builder.close()
    assert "closed" in error_of(future).reason
    assert wait_until(lambda: not any(map(lives, pids())))
    assert asker.submit(graph_job("sleep"))[0].exception(1.0)
    (again,) = ask(one).submit(graph_job("sleep"))
    result_of(again)


@pytest.mark.parametrize(
    "change",
    [
        {"payload": b"another"},
        {"payload": "text"},
        {"message": {"job": 0, "ok": True}},
        {"message": None},
    ],
)
def test_an_answer_that_is_none_is_refused(change: dict[str, Any]) -> None:
    good = built("tcp://a:1", compress_payload(b"graph"), {}, 1.0)
    assert read(good).worker == "tcp://a:1"
    with pytest.raises(Exception, match=r"it|payload|must"):
        read({**good, **change})


_WITHOUT = """
from warmgraph_backends.building import builder, chosen, claims, contract
print(sorted({"distributed", "dask", "toolz"} & set(sys.modules)))
"""


def test_nothing_of_dask_is_imported_unless_a_farm_is_asked_for() -> None:
    command = [sys.executable, "-c", ADOPT + _WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
