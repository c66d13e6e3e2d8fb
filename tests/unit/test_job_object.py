"""Under Windows a worker's compilers end with it, and workers with their server."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time

import psutil
import pytest

from warmgraph_backends.cleanup import job_object
from warmgraph_tools.by_path import ADOPT

windows = pytest.mark.skipif(sys.platform != "win32", reason="only Windows has job objects")

#: Starts a process that would outlive it, says its number, and waits.
PARENT = f"""{ADOPT}
import subprocess, time
from warmgraph_backends.cleanup.job_object import JobObject
if sys.argv[1] == "joins":
    job = JobObject()
    job.add()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
#: A server whose worker holds no job of its own.
SERVER = f"""{ADOPT}
import subprocess, time
from warmgraph_backends.cleanup.job_object import JobObject
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
job = JobObject()
job.add(worker._handle)
print(worker.pid, flush=True)
time.sleep(600)
"""


def _ends(pid: int) -> bool:
    until = time.monotonic() + 60.0
    while psutil.pid_exists(pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _child_of(code: str, *words: str) -> tuple[subprocess.Popen[str], int]:
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@windows
@pytest.mark.parametrize(("code", "words"), [(PARENT, ("joins",)), (SERVER, ())])
def test_what_a_killed_process_started_ends_with_it(code: str, words: tuple[str, ...]) -> None:
    parent, child = _child_of(code, *words)
    parent.kill()
    parent.wait()
    assert _ends(child)


@windows
def test_ending_a_job_ends_its_processes() -> None:
    parent, child = _child_of(PARENT, "stays out")
    job = job_object.JobObject()
    job.add(parent._handle)  # type: ignore[attr-defined]
    job.end()
    job.end()
    assert parent.wait(60) == 1
    psutil.Process(child).kill()  # which was started before


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="of 64 bits")
def test_its_limits_are_laid_out_as_windows_expects_them() -> None:
    """As winnt.h has them; of another size they are refused."""
    fields = ("flags", "least_memory", "processes", "affinity", "priority", "scheduling")
    places = [getattr(job_object._Basic, name).offset for name in fields]
    assert places == [16, 24, 40, 48, 56, 60]
    assert ctypes.sizeof(job_object._Limits) == 144
