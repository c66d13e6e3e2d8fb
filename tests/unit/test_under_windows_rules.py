"""Usual tests of store, clean-up and console, once more under Windows' rules: what they need of
files and streams holds there, too.
"""

from __future__ import annotations

import pytest

from warmgraph_backends.cleanup import temporary

from . import test_cli, test_store, test_store_faults, test_temporary
from .like_windows import CP1252, LikeWindows
from .test_temporary import temp as temp

USUAL = (
    test_store.test_link_takes_no_space_and_is_made_once,
    test_store.test_least_recently_used_go_first_until_the_rest_fits,
    test_store_faults.test_damaged_shared_file_is_moved_aside_and_replaced,
    test_store_faults.test_half_written_files_of_a_dead_writer_do_no_harm,
    test_temporary.test_what_a_killed_process_left_is_gone_at_the_next_start,
    test_temporary.test_a_living_process_keeps_its_folders,
    test_cli.test_a_copied_folder_loads_once_it_is_trusted,
    test_cli.test_names_that_no_console_shows_are_written_out,
)
globals().update({each.__name__: each for each in USUAL})


@pytest.fixture(autouse=True)
def _rules(like_windows: LikeWindows, monkeypatch: pytest.MonkeyPatch) -> None:
    like_windows.platform_of(temporary)
    for name, value in CP1252.items():
        monkeypatch.setenv(name, value)
