"""Temporary folders: each names its owner, and what belongs to no living process is swept up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from warmgraph_backends.cleanup import owners, temporary
from warmgraph_tools.by_path import ADOPT

ROOT = Path(__file__).resolve().parents[2]
LOADER = f"""{ADOPT}
import os, time
from warmgraph_backends.cleanup import temporary
for purpose in ("load", "worker"):
    folder = temporary.make(purpose)
    (folder / "kernel.cubin").write_bytes(b"code")
    print(folder, flush=True)
temporary.make_for_life("kernels")
if sys.argv[1] == "die":
    print("", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that temporary folders are made in."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_loader(temp: Path, how: str) -> list[Path]:
    """Run a process that makes folders; returns those that it does not remove itself."""
    loader = subprocess.Popen(
        [sys.executable, "-c", LOADER, how],
        env={**os.environ, "TMPDIR": str(temp), "TEMP": str(temp), "TMP": str(temp)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert loader.stdout is not None
    made = list(iter(loader.stdout.readline, "\n" if how == "die" else ""))
    loader.kill()
    loader.communicate()
    return [Path(line.strip()) for line in made]


def make_old(path: Path) -> Path:
    """Give a path the age at which nothing of ours is still in use."""
    old = time.time() - temporary.STALE_SECONDS - 60
    os.utime(path, (old, old))
    return path


def test_what_a_killed_process_left_is_gone_at_the_next_start(temp: Path) -> None:
    made = run_loader(temp, "die")
    assert len(made) == 2 and len(names(temp)) == 3
    temporary.sweep()
    assert names(temp) == []


def test_a_living_process_keeps_its_folders(temp: Path) -> None:
    mine = temporary.make("load")
    (mine / "kernel.so").write_bytes(b"code")
    make_old(mine)
    temporary.sweep()
    assert names(temp) == [mine.name] and names(mine) == ["kernel.so"]


def test_a_process_that_got_a_dead_ones_number_does_not_keep_its_folders(temp: Path) -> None:
    me = owners.me()
    earlier = me._replace(start=me.start - 1)
    (temp / f"warmgraph-load-{earlier}-abcdefgh").mkdir()
    temporary.sweep()
    assert names(temp) == []


def test_a_folder_of_another_machine_stays_until_it_is_old(temp: Path) -> None:
    """Its processes cannot be looked up from here: a container's, or a shared disk's."""
    elsewhere = owners.me()._replace(place="00000000")
    young = temp / f"warmgraph-worker-{elsewhere}-abcdefgh"
    old = temp / f"warmgraph-worker-{elsewhere}-bcdefghi"
    young.mkdir()
    old.mkdir()
    make_old(old)
    temporary.sweep()
    assert names(temp) == [young.name]


def test_folders_of_others_stay_however_old_they_are(temp: Path) -> None:
    for name in ("warmgraph-bench", "warmgraph-projects", "warmgraph-picture", "else"):
        (temp / name).mkdir()
    projects = temp / "warmgraph-projects"
    (projects / "image.png").write_bytes(b"image")
    dead = owners.me()._replace(start=1)
    (temp / f"warmgraph-load-{dead}").mkdir()  # not a name of ours: nothing random at its end
    (temp / f"warmgraph-load-{dead}-abcdefgh").write_text("a file")
    before = names(temp)
    for name in before:
        make_old(temp / name)
    temporary.sweep()
    assert names(temp) == before and names(projects) == ["image.png"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_are_neither_followed_nor_removed(temp: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "kernel.so").write_bytes(b"code")
    dead = owners.me()._replace(start=1)
    link = temp / f"warmgraph-load-{dead}-abcdefgh"
    link.symlink_to(target, target_is_directory=True)
    within = temp / f"warmgraph-load-{dead}-bcdefghi"
    within.mkdir()
    (within / "deep").symlink_to(target, target_is_directory=True)
    temporary.sweep()
    assert names(temp) == [link.name] and names(target) == ["kernel.so"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
def test_folders_of_other_users_stay(temp: Path) -> None:
    dead = owners.me()._replace(start=1)
    theirs = temp / f"warmgraph-load-{dead}-abcdefgh"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    temporary.sweep()
    assert names(temp) == [theirs.name]


def test_a_process_that_ends_well_takes_its_folders_for_life_along(temp: Path) -> None:
    made = run_loader(temp, "end")
    assert names(temp) == sorted(path.name for path in made)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_that_ends_leaves_the_folders_of_its_parent(temp: Path) -> None:
    code = LOADER.replace("if sys.argv", "if os.fork() == 0: sys.exit()\nos.wait()\nif sys.argv")
    code += "\nprint(sorted(os.listdir(os.environ['TMPDIR'])))"
    done = subprocess.run(
        [sys.executable, "-c", code, "end"],
        env={**os.environ, "TMPDIR": str(temp)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "warmgraph-kernels-" in done.stdout.splitlines()[-1]


def test_the_sweep_is_cheap_beside_thousands_of_others_folders(temp: Path) -> None:
    for number in range(2000):
        (temp / f"other-{number}").touch()
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        temporary.sweep()
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.5


def test_a_folder_for_a_while_names_its_owner_and_goes(temp: Path) -> None:
    with temporary.made("load") as folder:
        owner = temporary.owner_of(folder.name)
        assert owner == owners.me() and owners.life(owner) is owners.Life.ALIVE
        assert names(temp) == [folder.name]
    assert names(temp) == []


def test_owners_are_told_apart_in_words_that_survive_a_file_name() -> None:
    me = owners.me()
    assert owners.parse(str(me)) == me
    for text in ("", "1", "1.2.3", "x.2.00000000", f"{me}.", "1.2.00000000\n", "²." + "2.00000000"):
        assert owners.parse(text) is None
    assert owners.life(me._replace(pid=2**22 + 5)) is owners.Life.ENDED
    assert owners.life(me._replace(place="00000000")) is owners.Life.UNKNOWN
    assert owners.life(me._replace(start=0)) is owners.Life.UNKNOWN


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_killed_process_that_nobody_has_reaped_yet_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = owners.start_of(process.pid)
        assert start is not None
        owner = owners.me()._replace(pid=process.pid, start=start)
        assert owners.life(owner) is owners.Life.ALIVE
        process.kill()
        until = time.monotonic() + 60
        while owners.life(owner) is owners.Life.ALIVE:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert owners.life(owner) is owners.Life.ENDED
    finally:
        process.kill()
        process.communicate()


def test_where_there_is_no_proc_psutil_tells_which_process_it_is() -> None:
    """It comes with the host; Windows has nothing else."""
    pytest.importorskip("psutil", reason="psutil is not installed")
    first = owners._ask_psutil(os.getpid())
    assert first and owners._ask_psutil(os.getpid()) == first
    assert owners._ask_psutil(2**22 + 5) is None


@pytest.mark.skipif(sys.platform != "win32", reason="only Windows' driver asks for ASCII")
def test_where_the_users_name_is_not_ascii_our_folders_have_a_path_that_is(
    temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = temp / "人像"
    foreign.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(foreign))
    with temporary.made("load") as folder:
        assert str(folder).isascii() and folder.is_dir()
    assert not folder.exists()
