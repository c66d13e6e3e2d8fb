"""What goes wrong under Windows alone: each fault that was found, by the rules of `like_windows`.

Which paths a build makes for a card (260 characters), `compile/test_pretended_card.py` asks; which
Triton fits and what a `cl` must be, `test_preflight.py` and `test_doctor.py`.
"""

from __future__ import annotations

import ast
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import filelock
import pytest

from warmgraph_backends.building import claims, worker_process
from warmgraph_backends.building.claims import Claims
from warmgraph_backends.building.worker_process import WorkerProcess
from warmgraph_backends.cleanup import owners, temporary
from warmgraph_backends.errors import GraphFileError
from warmgraph_backends.sessions.settings import Settings
from warmgraph_backends.storing import files
from warmgraph_backends.storing.graph_file import file_name
from warmgraph_backends.storing.signing import Signer
from warmgraph_console import own_server
from warmgraph_tools.by_path import ROOT

from .like_windows import CP1252, LONGEST, Job, LikeWindows
from .stores import KEY, make_store, put
from .test_own_server import ENDS_WELL

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="imitates it")


@pytest.fixture
def holding(like_windows: LikeWindows) -> Any:
    """Opens a file as a virus scanner does: until somebody was refused it, or for good."""
    held: dict[str, Any] = {}

    def hold(path: Path, *, for_good: bool = False) -> None:
        held[str(path)] = open(path, "rb")  # noqa: SIM115
        if not for_good:
            like_windows.refused = lambda refused: held.pop(refused).close()

    yield hold
    for file in held.values():
        file.close()


# The rules themselves


def test_the_imitation_refuses_what_windows_refuses(
    like_windows: LikeWindows, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with file.open("rb"):
        for act in (file.unlink, lambda: os.replace(tmp_path / "file", tmp_path / "other")):
            with pytest.raises(PermissionError):
                act()
        with pytest.raises(PermissionError):
            tmp_path.rename(tmp_path.with_name("elsewhere"))  # something in it is open
    file.unlink()
    with pytest.raises(FileNotFoundError):
        (tmp_path / ("n" * (LONGEST - len(str(tmp_path))))).write_bytes(b"")
    (tmp_path / ("n" * (LONGEST - 1 - len(str(tmp_path))))).write_bytes(b"")
    assert not hasattr(os, "fork")


# 1: C++ kernels, whose suffix was Linux'


def test_a_loaded_kernel_lies_in_a_folder_that_is_left_to_a_later_start(
    like_windows: LikeWindows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be deleted while this process lives, and that is no error."""
    like_windows.platform_of(temporary)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary.time, "sleep", lambda _: None)
    folder = temporary.make("kernels")
    library = folder / "kernel.pyd"
    shutil.copyfile(_a_library(), library)
    ctypes.CDLL(str(library))
    temporary.remove(folder)
    assert library.exists()


def _a_library() -> str:
    """A small library that is loaded already, but under another name."""
    import _ctypes

    return str(_ctypes.__file__)


# 4: a worker's streams


def test_a_command_prints_a_path_that_its_streams_cannot_show(tmp_path: Path) -> None:
    """A name in Chinese, and streams of Western Europe, as where output goes to a file."""
    path = tmp_path / "人像.graphs"
    path.mkdir()
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "explain", str(path), "--user-directory", str(path)],
        env={**os.environ, **CP1252},
        capture_output=True,
        timeout=120,
    )
    assert b"Traceback" not in done.stderr, done.stderr
    assert b"\\u4eba\\u50cf" in done.stdout + done.stderr


# 6: paths that only begin with \\?\


def test_a_workers_folder_goes_with_all_that_triton_wrote_into_it(
    like_windows: LikeWindows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    like_windows.platform_of(temporary)
    with temporary.made("worker") as folder:
        deep = Path(f"\\\\?\\{folder}", "t", "K" * 52, "tmp.pid_1234_" + "0" * 36)
        for parent in (deep.parents[1], deep.parents[0], deep):
            os.mkdir(parent)
        with open(deep / ("k" * 142 + ".cubin"), "wb"):
            pass
    assert list(tmp_path.iterdir()) == []


# 7: a user whose name is not ASCII


@pytest.mark.parametrize("names", ["short ones", "none"])
def test_kernels_lie_below_an_ascii_path_and_are_swept_there(
    like_windows: LikeWindows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    """By the folder's short name, or where the disk keeps none, beside all users' programs."""
    temp, short, programs = tmp_path / "人像", tmp_path / "3A2C~1", tmp_path / "ProgramData"
    for folder in (temp, programs):
        folder.mkdir()
    short.symlink_to(temp)
    like_windows.platform_of(temporary)
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    monkeypatch.setenv("PROGRAMDATA", str(programs))
    monkeypatch.setattr(
        temporary, "_short_name", lambda _path: str(short) if names == "short ones" else str(temp)
    )
    with temporary.made("load") as folder:
        assert folder.parent == (short if names == "short ones" else programs)
    ended = owners.me()._replace(start=1)
    monkeypatch.setattr(owners, "me", lambda: ended)
    left = [temporary.make("worker"), temp / f"warmgraph-worker-{ended}-abcdefgh"]
    left[1].mkdir()
    temporary.sweep()
    assert not any(folder.exists() for folder in left)


# 8: a virus scanner, or OneDrive


@pytest.mark.usefixtures("like_windows")
def test_a_graph_is_put_once_the_scanner_has_let_its_place_go(tmp_path: Path, holding: Any) -> None:
    store = make_store(tmp_path)
    holding(_damaged(put(store)))
    put(store)
    assert store.load(KEY) is not None
    assert not list(store.root.glob(".*"))  # nor is a draft left


@pytest.mark.usefixtures("like_windows")
def test_settings_are_kept_once_the_scanner_has_let_them_go(tmp_path: Path, holding: Any) -> None:
    settings = Settings(tmp_path)
    settings.update({"workers": 1})
    holding(settings.path)
    settings.update({"workers": 2})
    assert Settings(tmp_path).as_dict()["workers"] == 2


@pytest.mark.usefixtures("like_windows")
def test_a_file_that_stays_held_is_said_to_be_held(
    tmp_path: Path, holding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that the disk is full."""
    waited: list[float] = []
    monkeypatch.setattr(files.time, "sleep", waited.append)
    store = make_store(tmp_path)
    holding(_damaged(put(store)), for_good=True)
    with pytest.raises(GraphFileError, match="another program holds it open") as caught:
        put(store)
    assert "virus scanners" in str(caught.value.remedy) and "space" not in str(caught.value)
    assert 3 < sum(waited) < 10


def _damaged(path: Path) -> Path:
    path.write_bytes(b"no graph")
    return path


# 9: claims


def test_a_folder_that_refuses_claims_is_not_taken_for_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older filelocks say so of any file that cannot be opened."""

    class Older(filelock.FileLock):  # type: ignore[misc]
        def acquire(self, *_: Any, **__: Any) -> Any:
            raise filelock.Timeout(self.lock_file)

    monkeypatch.setattr(filelock, "FileLock", Older)
    mine = Claims(tmp_path, Signer(tmp_path / "private"), patience_s=lambda: 60.0)
    assert mine.take(KEY)  # is built at once
    mine._path(KEY).write_bytes(b"")
    assert claims._lock(mine._path(KEY)) is None  # somebody has this one


# 10: long names of workflows


def test_a_name_that_leaves_no_room_for_a_graph_is_named_as_too_long(
    like_windows: LikeWindows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LONGEST_PATH", LONGEST)
    store = make_store(tmp_path)
    put(store)
    graph = len(os.sep + file_name(KEY, hidden=True))
    fits = _folder_of(tmp_path, LONGEST - graph)
    assert store.link(KEY, fits) and store.load(KEY, [fits])
    too_long = _folder_of(tmp_path, LONGEST + 1 - graph)
    with pytest.raises(GraphFileError, match="its path has 260 characters") as caught:
        store.link(KEY, too_long)
    assert "shorter name" in str(caught.value.remedy) and "space" not in str(caught.value)


def _folder_of(parent: Path, characters: int) -> Path:
    """A folder whose path has so many."""
    return parent / "n".ljust(characters - len(os.sep + str(parent)), "n")


# 11: compilers of a killed worker (Windows itself: `test_job_object.py`)


def test_a_worker_is_in_a_job_that_ends_with_it(
    like_windows: LikeWindows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without groups of processes, and without SIGKILL."""
    jobs: list[Job] = []
    monkeypatch.setattr(worker_process, "JobObject", lambda: jobs.append(Job()) or jobs[-1])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    like_windows.platform_of(worker_process, temporary)
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n", "utf-8")
    for end in (WorkerProcess.kill, WorkerProcess.end):
        worker = WorkerProcess(script)
        assert jobs[-1].held == [worker.pid] and worker.alive()
        end(worker)
        worker.end()
        assert jobs[-1].is_over and not worker.alive() and not worker.cache.exists()
    assert len(jobs) == 2


# 12: the end of a command's own server


def test_a_commands_server_ends_with_clean_up_and_without_a_console(
    like_windows: LikeWindows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal is sent: without a console none arrives."""
    like_windows.platform_of(own_server)
    monkeypatch.delattr(subprocess.Popen, "send_signal")
    (tmp_path / "main.py").write_text(ENDS_WELL, "utf-8")
    with own_server.OwnServer(tmp_path, tmp_path / "log") as server:
        assert server.get("/system_stats") == {}
    assert (tmp_path / "cleaned up").read_text() == str(tmp_path)
    assert "Traceback" not in server.log


# 13: tests


def test_every_test_file_can_be_imported_where_there_is_no_sigkill() -> None:
    """Within a test that Windows does not run it may be named."""
    texts = {path: path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
    for path, text in texts.items():
        if "signal.SIGKILL" not in text:
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.body = []
        named = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        assert "SIGKILL" not in named, path
