"""A job that fails, or a worker that dies, costs that job alone and is told in words."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from warmgraph_backends.building.answers import WorkerError
from warmgraph_backends.building.contract import Job

from ..workers import wait_until, worker_pids
from .jobs import error_of, job, result_of, starts

ROOT = Path(__file__).resolve().parents[3]


def test_a_job_that_raises_fails_alone_with_words_and_the_workers_traceback(make):
    builder = make()
    failed, good = builder.submit(job("fail", cost=2)), builder.submit(job("sleep"))
    error = error_of(failed)
    assert error.reason == "ValueError: the compiler is unhappy"
    assert isinstance(error.__cause__, WorkerError)
    assert "and says more" in str(error.__cause__) and "in fail" in str(error.__cause__)
    result_of(good)


def test_a_worker_stays_after_a_refusal_and_after_any_error_of_a_job(make):
    builder = make()
    before = result_of(builder.submit(job("sleep"))).facts["pid"]
    refused = error_of(builder.submit(job("refuse")))
    assert (refused.reason, refused.remedy) == ("no Triton here", "install it")
    assert result_of(builder.submit(job("sleep"))).facts["pid"] == before
    error_of(builder.submit(job("fail")))
    assert result_of(builder.submit(job("sleep"))).facts["pid"] == before


@pytest.mark.parametrize("by", ["card", "worker", "memory", "exit"])
def test_a_worker_is_replaced_where_the_next_job_would_fail_too(make, by):
    builder = make()
    before = result_of(builder.submit(job("sleep"))).facts["pid"]
    error_of(builder.submit(job("spoil", by=by)))
    assert result_of(builder.submit(job("sleep"))).facts["pid"] != before


def test_a_result_that_is_no_plain_data_fails_its_job_only(make, tmp_path):
    builder = make()
    bad, good = builder.submit(job("unprintable_facts", cost=2)), builder.submit(job("sleep"))
    assert "plain JSON" in error_of(bad).reason
    result_of(good)


def test_a_task_that_is_no_plain_data_fails_its_job_only(make):
    builder = make()
    bad = builder.submit(Job("k", "odd one", 5, {"do": object()}))
    assert "odd one" in error_of(bad).reason
    result_of(builder.submit(job("sleep")))


def test_a_worker_that_dies_costs_its_job_only_and_is_named(make):
    builder = make(workers=2)
    jobs = [job("sleep", seconds=0.1) for _ in range(6)]
    futures = [builder.submit(j) for j in jobs]
    dead = builder.submit(job("die", cost=9, label="ResBlock 320->640"))
    reason = error_of(dead).reason
    assert "ResBlock 320->640" in reason and "exit code 7" in reason
    assert "Fatal Python error: this is the end" in reason
    for future in futures:
        result_of(future)


def test_more_deaths_than_a_start_is_given_cost_one_job_each(make):
    builder = make()
    dying = [builder.submit(job("die", cost=9)) for _ in range(5)]
    good = builder.submit(job("sleep"))
    for future in dying:
        assert "exit code 7" in error_of(future).reason
    result_of(good)


def test_a_job_over_its_time_is_stopped_and_the_rest_goes_on(make, temp):
    builder = make()
    limits = iter([1.0])
    builder._time_limit_s = lambda: next(limits, 60.0)
    slow, good = (
        builder.submit(job("sleep", seconds=600, cost=9, label="huge")),
        builder.submit(job("sleep")),
    )
    assert error_of(slow).reason == 'building "huge" took longer than 1 s and was stopped'
    result_of(good)
    assert (
        len(list(temp.iterdir())) == 1
    )  # the killed worker's cache is gone, its successor's is there


def test_what_compilers_print_and_read_does_not_reach_the_protocol(make):
    builder = make()
    result_of(builder.submit(job("make_noise")))
    result_of(builder.submit(job("sleep")))
    assert len(worker_pids(builder)) == 1


def test_floods_on_stderr_neither_block_nor_grow(make):
    builder = make()
    result_of(builder.submit(job("flood_stderr")))
    assert (
        "last line before the end" in error_of(builder.submit(job("flood_stderr", die=True))).reason
    )


def test_workers_that_only_die_at_their_start_fail_all_jobs_and_are_not_started_forever(
    make, tmp_path
):
    builder = make(hello={"die_at_start": True})
    futures = [builder.submit(job("sleep")) for _ in range(5)]
    for future in futures:
        assert "no such library" in error_of(future).reason
    assert starts(tmp_path) == 3
    time.sleep(0.3)
    assert starts(tmp_path) == 3
    assert builder.progress()[:2] == (5, 5)
    assert "no such library" in error_of(builder.submit(job("sleep"))).reason
    assert starts(tmp_path) == 6
    for _ in range(3):  # and not three more at each prompt
        error = error_of(builder.submit(job("sleep")))
        assert error.final and "no such library" in error.reason
    assert starts(tmp_path) == 6


def test_a_worker_that_starts_well_gives_those_that_died_before_it_their_tries_back(
    make, tmp_path, monkeypatch
):
    builder = make(hello={"die_at_start": True})
    error_of(builder.submit(job("sleep")))
    monkeypatch.setitem(builder._hello, "die_at_start", False)
    result_of(builder.submit(job("sleep")))
    error_of(builder.submit(job("die")))
    monkeypatch.setitem(builder._hello, "die_at_start", True)
    assert wait_until(lambda: worker_pids(builder) == [])
    for _ in range(2):
        assert not error_of(builder.submit(job("sleep"))).final
    assert error_of(builder.submit(job("sleep"))).final
    assert starts(tmp_path) == 3 + 1 + 3 + 3


@pytest.mark.parametrize("workers", [1, 4])
def test_a_job_that_no_other_can_do_better_ends_all_and_nothing_starts_again(
    make, tmp_path, workers
):
    builder = make(workers=workers)
    for future in [builder.submit(job("refuse_for_good")) for _ in range(9)]:
        error = error_of(future)
        assert error.final
        assert (error.reason, error.remedy) == ("nothing compiles here", "update torch")
        assert isinstance(error.__cause__, WorkerError)
    assert wait_until(lambda: all(thread.is_ready for thread in list(builder._threads)))
    started = starts(tmp_path)
    assert started <= workers
    assert error_of(builder.submit(job("sleep"))).final, "also a job that nobody has tried"
    done, total = builder.progress()[:2]
    assert done == total
    time.sleep(0.3)
    assert starts(tmp_path) == started


def test_a_worker_that_says_it_is_unfit_for_good_is_believed_at_once(make, tmp_path):
    builder = make(hello={"unfit_for_good": "this torch has no compiler"})
    for _ in range(2):
        for future in [builder.submit(job("sleep")) for _ in range(3)]:
            error = error_of(future)
            assert error.final and "(this torch has no compiler)" in error.reason
        assert starts(tmp_path) == 1


def test_many_workers_that_die_at_their_start_end_too(make, tmp_path):
    builder = make(workers=6, hello={"unfit": "no module named comfy"})
    for future in [builder.submit(job("sleep")) for _ in range(12)]:
        error = error_of(future)
        assert "no module named comfy" in error.reason
        assert isinstance(error.__cause__, WorkerError)
    assert 3 <= starts(tmp_path) <= 8


def test_a_worker_that_never_gets_ready_is_stopped(make):
    builder = make(hello={"hang_at_start": True}, start_limit_s=0.3)
    assert "not ready after 0.3 s" in error_of(builder.submit(job("sleep"))).reason
    assert wait_until(lambda: worker_pids(builder) == [])


def test_an_interpreter_that_cannot_be_started_fails_in_words(make, tmp_path, monkeypatch):
    builder = make()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    assert "could not be started" in error_of(builder.submit(job("sleep"))).reason


def test_an_idle_worker_that_was_killed_costs_no_job(make):
    builder = make()
    pid = result_of(builder.submit(job("sleep"))).facts["pid"]
    (thread,) = builder._threads
    os.kill(pid, signal.SIGTERM)
    assert wait_until(lambda: not thread._process.alive())
    assert result_of(builder.submit(job("sleep"))).facts["pid"] != pid


def test_the_real_worker_tells_in_words_that_its_host_is_missing(make, tmp_path):
    builder = make(
        script=ROOT / "backends" / "worker" / "main.py",
        hello={
            "argv": ["main.py", "--cpu"],
            "host": str(tmp_path / "nowhere"),
            "cwd": str(tmp_path),
        },
    )
    reason = error_of(builder.submit(Job("k", "a kind", 1, {}))).reason
    assert "build workers cannot start here" in reason, reason
