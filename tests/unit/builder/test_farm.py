"""A build farm over TCP: who builds what, and who does when somebody is gone."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from warmgraph_backends.building.answers import AnswerError
from warmgraph_backends.building.builder import Builder
from warmgraph_backends.building.contract import BuildResult, Job
from warmgraph_backends.building.farm import Farm as FarmOf
from warmgraph_backends.building.farm_messages import answer, facts_of, read, resource_of
from warmgraph_backends.storing.graph_file import compress_payload, unpack_payload
from warmgraph_tools.by_path import ADOPT
from warmgraph_tools.farm import Farm

from ..workers import lives, wait_until
from .jobs import error_of, job, result_of

WORKER = Path(__file__).with_name("farm_worker.py")
TESTS = Path(__file__).resolve().parents[1]
BACKENDS = TESTS.parents[1] / "backends"


class Asker:
    """A server that asks a farm.

    Attributes:
        builder: its own, which builds what the farm does not.
    """

    def __init__(self, farm: Farm, builder: Builder, roll: Path, **options: Any) -> None:
        self.builder = builder
        self._roll = roll
        hello = {"argv": ["main.py"], "pretended": None}
        options = {"time_limit_s": lambda: 60.0, "host": TESTS, **options}
        FarmOf(farm.address, builder, hello=hello, **options)

    def submit(self, *jobs: Job) -> list[Any]:
        return [self.builder.submit(each) for each in jobs]

    def running(self) -> set[str]:
        return set(self.builder.progress().running)

    def built_here(self, result: BuildResult) -> bool:
        return self._roll.exists() and str(pid_of(result)) in self._roll.read_text().split()

    @property
    def builds_here(self) -> bool:
        """Whether its own builder has ever had a worker."""
        return self._roll.exists()


def graph_job(do: str, device: str = "cpu", **task: Any) -> Job:
    """A job whose graph is for a processor, or another device."""
    return job(do, description={"device": device}, backend="inductor", **task)


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
def ask(make: Callable[..., Builder], tmp_path: Path) -> Callable[..., Asker]:
    """`ask(farm, nobody_s=...)`: a server; it goes when the test is over."""
    numbers = count()

    def make_asker(farm: Farm, **options: Any) -> Asker:
        roll = tmp_path / f"roll {next(numbers)}"
        return Asker(farm, make(hello={"roll": str(roll)}), roll, **options)

    return make_asker


def pid_of(result: BuildResult) -> int:
    return int(result.facts["pid"])


def who_builds(farm: Farm) -> list[str]:
    return [name for name in farm.workers if farm.begun(name)]


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
    assert not asker.builds_here
    assert not asker.builder.is_building()
    assert asker.builder.progress().done == 3


def read_text(result: BuildResult) -> str:
    return unpack_payload(result.payload).decode()


def test_what_several_servers_ask_for_is_built_once_and_for_those_that_stay(
    farm: Farm, ask: Callable[..., Asker], tmp_path: Path
) -> None:
    add(farm, "a", "b")
    end = tmp_path / "end"
    same = graph_job("wait", until=str(end))
    askers = [ask(farm) for _ in range(3)]
    (gone,), (first,), (second,) = (each.submit(same) for each in askers)
    assert wait_until(lambda: all(each.running() for each in (gone, first, second)))
    assert wait_until(lambda: bool(who_builds(farm)))
    askers[0].builder.close()
    assert "closed" in error_of(gone).reason
    end.touch()
    assert pid_of(result_of(first)) == pid_of(result_of(second))
    assert farm.begun("a") + farm.begun("b") == 1


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_worker_that_ends_in_mid_build_leaves_its_job_to_the_other_and_nothing_else(
    farm: Farm, ask: Callable[..., Asker], tmp_path: Path, name: str
) -> None:
    add(farm, "a", "b")
    asker, end, pids = ask(farm), tmp_path / "end", tmp_path / "pids"
    (future,) = asker.submit(graph_job("wait", until=str(end), pid_file=str(pids)))
    assert wait_until(pids.exists)
    (worker,) = who_builds(farm)
    pid = int(pids.read_text())
    farm.end(worker, getattr(signal, name, signal.SIGTERM))  # Windows' ends at once, too
    assert wait_until(lambda: not lives(pid))
    (other,) = farm.workers
    assert wait_until(lambda: farm.begun(other) == 1)
    end.touch()
    assert pid_of(result_of(future)) != pid
    assert not asker.builds_here
    farm.stop()
    assert wait_until(lambda: farm.left() == []), farm.left()


def test_a_cancel_drops_what_waits_and_what_is_at_the_farm_comes_to_its_end(
    one: Farm, ask: Callable[..., Asker], tmp_path: Path
) -> None:
    before = one.begun("a")
    asker, end = ask(one), tmp_path / "end"
    (running,) = asker.submit(graph_job("wait", until=str(end), payload="kept"))
    assert wait_until(lambda: one.begun("a") == before + 1)
    (waiting,) = asker.submit(graph_job("sleep"))
    asker.builder.pause(True)
    assert asker.builder.progress().paused
    assert asker.builder.cancel() == 1
    assert waiting.cancelled()
    assert not asker.builder.progress().paused  # a cancel ends it
    end.touch()
    assert read_text(result_of(running)) == "kept"
    (after,) = asker.submit(graph_job("sleep"))
    result_of(after)
    assert (asker.builds_here, one.begun("a") - before) == (False, 2)


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
    end.touch()
    assert wait_until(lambda: first.done() or second.done())
    (third,) = asker.submit(graph_job("sleep"))
    with pytest.raises(TimeoutError):
        third.result(1.0)
    assert one.begun("a") - before == 1
    asker.builder.pause(False)
    for each in (first, second, third):
        result_of(each)


def test_what_the_scheduler_takes_along_is_built_here(
    farm: Farm, ask: Callable[..., Asker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(farm, "a")
    asker, end = ask(farm), tmp_path / "end"
    futures = asker.submit(*(graph_job("wait", until=str(end)) for _ in range(2)))
    assert wait_until(lambda: bool(asker.running()))
    farm.kill_scheduler()
    assert wait_until(lambda: asker.builds_here)
    end.touch()
    futures += asker.submit(graph_job("sleep"))
    assert all(asker.built_here(result_of(each)) for each in futures)
    assert f"Build farm {farm.address}: what it was asked for is built here: " in caplog.text
    assert "its scheduler is gone" in caplog.text
    assert farm.workers.pop("a").wait(60) == 1  # a worker without a scheduler ends
    assert wait_until(lambda: farm.left() == [])


def test_a_scheduler_that_answers_no_more_holds_nothing_up(
    farm: Farm, ask: Callable[..., Asker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(farm, "a")
    asker, end = ask(farm, nobody_s=3.0), tmp_path / "end"
    running, waiting = asker.submit(*(graph_job("wait", until=str(end)) for _ in range(2)))
    assert wait_until(lambda: bool(asker.running()))
    farm.scheduler.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: asker.builds_here)
    end.touch()
    assert all(asker.built_here(result_of(each)) for each in (running, waiting))
    assert "is built here: its scheduler does not answer" in caplog.text


def test_a_worker_of_another_version_is_named_and_others_build(
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
    assert asker.built_here(result_of(here))
    words = "a machine of the build farm is not like this one: made by another version of Warmgraph"
    assert words in caplog.text
    assert "is built here: none of its workers is like this machine" in caplog.text
    add(farm, "same")
    later = ask(farm)
    for future in later.submit(*(graph_job("sleep") for _ in range(2))):
        result_of(future)
    assert not later.builds_here
    assert (farm.begun("same"), farm.begun("other")) == (2, 0)


def test_a_worker_of_another_comfyui_is_named_by_what_differs(
    one: Farm, ask: Callable[..., Asker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = one.begun("a")
    (tmp_path / "comfyui_version.py").write_text('__version__ = "9.9"\n')
    asker = ask(one, host=tmp_path)
    for device in ("cpu", "cuda"):
        (future,) = asker.submit(graph_job("sleep", device))
        assert asker.built_here(result_of(future))
    named = [m for m in caplog.messages if "builds nothing for this server" in m]
    assert len(named) == 1  # the same for both
    assert named[0].endswith("not like this one: ComfyUI: made for None, this machine has 9.9")
    assert one.begun("a") == before


def test_a_card_that_is_pretended_need_not_be_at_the_worker() -> None:
    here, there = {"device": "cuda", "capability": "9.0"}, {"device": "cuda", "capability": None}
    for pretended in (False, True):
        alike = [resource_of(facts_of(e, TESTS, pretended=pretended)) for e in (here, there)]
        assert (alike[0] == alike[1]) is pretended


def test_a_farm_without_workers_is_not_waited_for(
    farm: Farm, ask: Callable[..., Asker], caplog: pytest.LogCaptureFixture
) -> None:
    asker = ask(farm, nobody_s=1.0)
    (future,) = asker.submit(graph_job("sleep"))
    assert asker.built_here(result_of(future))
    assert "is built here: it has no workers" in caplog.text


@pytest.mark.parametrize(
    ("do", "words"),
    [("fail", "ValueError: the compiler is unhappy"), ("die", "died (exit code 7")],
)
def test_what_fails_there_is_built_here_whose_word_counts(
    one: Farm,
    ask: Callable[..., Asker],
    do: str,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = one.begun("a")
    asker = ask(one)
    (future,) = asker.submit(graph_job(do))
    error = error_of(future)
    assert words in error.reason
    assert asker.builds_here
    assert one.begun("a") - before == 2  # dask tries it once more
    assert "is built here: " in caplog.text and caplog.text.count(words) == 1


def test_a_job_that_takes_too_long_is_stopped_there(one: Farm, ask: Callable[..., Asker]) -> None:
    asker = ask(one, time_limit_s=lambda: 0.5)
    slow = graph_job("sleep", seconds=3.0)
    (future,) = asker.submit(slow)
    assert asker.built_here(result_of(future))  # whose limit is a minute
    assert f'building "{slow.label}" took longer than 0.5 s and was stopped' in one.log("a")


def test_a_machine_on_which_nothing_compiles_leaves_the_farm(
    farm: Farm, ask: Callable[..., Asker]
) -> None:
    add(farm, "a")
    asker = ask(farm, nobody_s=1.0)
    (future,) = asker.submit(graph_job("refuse_for_good"))
    assert error_of(future).reason == "nothing compiles here"
    assert farm.workers.pop("a").wait(60) == 1
    assert "nothing can be built here: nothing compiles here" in farm.log("a")


def test_what_is_no_graph_is_done_here(one: Farm, ask: Callable[..., Asker]) -> None:
    before = one.begun("a")
    asker = ask(one)
    (future,) = asker.submit(job("sleep"))
    assert asker.built_here(result_of(future))
    assert one.begun("a") == before


def test_what_a_server_that_goes_has_asked_for_ends_and_the_farm_goes_on(
    one: Farm, ask: Callable[..., Asker], tmp_path: Path
) -> None:
    before = one.begun("a")
    asker, end = ask(one), tmp_path / "end"
    futures = asker.submit(*(graph_job("wait", until=str(end)) for _ in range(2)))
    assert wait_until(lambda: one.begun("a") == before + 1)
    asker.builder.close()
    assert all("closed" in error_of(each).reason for each in futures)
    assert asker.submit(graph_job("sleep"))[0].exception(1.0)
    (again,) = ask(one).submit(graph_job("sleep"))
    end.touch()
    result_of(again)
    assert one.begun("a") - before == 2  # what had not begun is forgotten


@pytest.mark.parametrize(
    "change",
    [{"payload": b"another"}, {"payload": "text"}, {"ok": None}, {"facts": None}, {"job": 1}],
)
def test_an_answer_that_is_none_is_refused(change: dict[str, Any]) -> None:
    good = answer(BuildResult("key", compress_payload(b"graph"), {}, 1.0))
    assert read_text(read("key", dict(good))) == "graph"
    with pytest.raises(AnswerError):
        read("key", {**good, **change})


_WITHOUT = """
from warmgraph_backends.building import builder, claims, contract, farm
print(sorted({"distributed", "dask", "toolz"} & set(sys.modules)))
"""


def test_nothing_of_dask_is_imported_unless_a_farm_is_asked_for() -> None:
    command = [sys.executable, "-c", ADOPT + _WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
