"""Usual tests of the builder and its workers, once more under Windows' rules: without groups of
processes, without SIGKILL, and with folders that stay while anything in them is open.
"""

from __future__ import annotations

import pytest

from warmgraph_backends.building import worker_process
from warmgraph_backends.cleanup import temporary

from ..like_windows import Job, LikeWindows
from . import test_workers

USUAL = (
    test_workers.test_idle_workers_go_and_come_back_on_demand,
    test_workers.test_a_worker_that_dies_while_it_measures_lets_the_next_one,
)
globals().update({each.__name__: each for each in USUAL})


@pytest.fixture(autouse=True)
def _rules(like_windows: LikeWindows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "JobObject", Job)
    like_windows.platform_of(worker_process, temporary)
