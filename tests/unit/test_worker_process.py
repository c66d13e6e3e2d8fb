"""Words about how workers end, and what is swept up after builders that were killed."""

from __future__ import annotations

import os
import sys
import tempfile
import time

import pytest

from warmgraph_backends.building import worker_process as processes
from warmgraph_backends.cleanup import owners, temporary
from warmgraph_backends.cleanup.keeper import processes_of


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-11, "SIGSEGV"),
        (-9, "memory"),
        (0xC0000005, "0xC0000005"),
    ],
)
def test_an_end_is_told_in_words(returncode, words):
    assert words in processes.exit_words(returncode)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["Traceback", "ValueError: bad", "  ^^^", ""], "ValueError: bad"),
        (
            ["Fatal Python error: Segmentation fault", "Thread 0x1:", "  File x"],
            "Fatal Python error: Segmentation fault",
        ),
        (["all is well", ""], "all is well"),
        ([], ""),
    ],
)
def test_last_words_are_the_line_that_names_the_error(lines, expected):
    assert processes.last_words(lines) == expected


def test_the_sweep_takes_what_was_left_and_leaves_what_may_be_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = tmp_path / "spool"
    spool.mkdir()
    old = time.time() - temporary.STALE_SECONDS - 60
    for name in ("old.works", "new.works", "kept.txt"):
        (spool / name).write_text("x")
    for name in ("old.works", "kept.txt"):
        os.utime(spool / name, (old, old))
    me = owners.me()
    for owner in (me, me._replace(start=1)):
        (tmp_path / f"warmgraph-worker-{owner}-abcdefgh").mkdir()
    processes.sweep(spool)
    mine = f"warmgraph-worker-{me}-abcdefgh"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["spool", mine])
    assert sorted(path.name for path in spool.iterdir()) == ["kept.txt", "new.works"]


def test_a_script_that_is_no_worker_dies_with_its_exit_code_and_words(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('noise'); raise SystemExit('cannot open shared object')")
    process = processes.WorkerProcess(script)
    try:
        with pytest.raises(
            processes.DeadWorkerError, match=r"exit code 1.*cannot open shared object"
        ):
            process.receive()
    finally:
        process.end()
    assert not process.cache.exists()


def test_last_words_are_waited_for_where_their_reader_is_late(tmp_path):
    class Late(processes.WorkerProcess):
        def _read_stderr(self, stream):
            time.sleep(1.5)
            super()._read_stderr(stream)

    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('cannot open shared object')")
    process = Late(script)
    try:
        with pytest.raises(processes.DeadWorkerError, match="cannot open shared object"):
            process.receive()
    finally:
        process.end()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is /proc")
def test_a_compiler_that_outlives_its_worker_does_not_hold_up_the_last_words(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess as s, sys\n"
        "code = 'import os, time; os.write(1, bytes(1)); time.sleep(600)'\n"
        "command = [sys.executable, '-c', code]\n"
        "s.Popen(command, start_new_session=True, stdout=s.PIPE).stdout.read(1)\n"
        "raise SystemExit('cannot open shared object')"
    )
    process = processes.WorkerProcess(script)
    try:
        with pytest.raises(processes.DeadWorkerError, match="cannot open shared object"):
            process.receive()
        assert processes_of([process.cache]) == [] and not process._drain.is_alive()
    finally:
        process.end()


def test_a_missing_interpreter_is_an_error_that_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(OSError):
        processes.WorkerProcess(tmp_path / "script.py")
    assert list(tmp_path.iterdir()) == []
