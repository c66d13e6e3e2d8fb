"""Worker processes: start, talk, kill; the only module that starts programs.

Nothing here forks the server, runs a shell or waits on several pipes at once, so Windows is no
special case but for the flags at creation, and a job object where POSIX has a group of processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from ..cleanup import owners, temporary
from ..cleanup.job_object import JobObject
from ..cleanup.keeper import VARIABLE, end_processes_of
from ..reasons import Reason, of
from .messages import REMEMBERED, ProtocolError, read_message, skip_noise, write_message

logger = logging.getLogger(__name__)

KEEPER = Path(__file__).parents[1] / "cleanup" / "keeper.py"
_KEEPER_S = 5.0
_LAST_WORDS_S = 10.0
_KEPT_LINES = 60
_LINE_CHARACTERS = 500
_ERROR_LINE = re.compile(r"Fatal Python error|\b\w+(Error|Exception|Interrupt)\b")


class DeadWorkerError(Exception):
    """A worker process ended while an answer was due; the text says how, with its last words."""


class WorkerProcess:
    """One worker process, its pipes, and a cache folder that lives exactly as long as it does.

    `send`, `receive` and `end` belong to one thread; `kill` may be called from any.
    """

    def __init__(
        self,
        script: Path,
        *,
        keeper: Keeper | None = None,
        cwd: str | None = None,
        threads: int = 1,
    ) -> None:
        """Start `script` with this interpreter, from a thread that lives as long as the process:
        with it, Linux ends it.

        Args:
            script: a script that serves the protocol.
            keeper: clears up if this process is killed.
            cwd: working directory; the server's own if there is no such folder.
            threads: processor threads that its numeric libraries use.

        Raises:
            OSError: the process or its cache folder cannot be made.
        """
        if not sys.executable:
            raise OSError("this Python does not know its own executable (sys.executable is empty)")
        self.cache = temporary.make("worker")
        self._keeper = keeper
        try:
            if keeper:
                keeper.watch(self.cache)
            self._process = subprocess.Popen(
                [sys.executable, *_interpreter_flags(), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=cwd if cwd and Path(cwd).is_dir() else None,
                env=_environment(os.environ, self.cache, threads),
                creationflags=_creation_flags(),
            )
        except BaseException:
            self._clear_up()
            raise
        self.pid = self._process.pid
        self._job = _job_of(self._process)
        self._stdin = cast(BinaryIO, self._process.stdin)
        self._stdout = cast(BinaryIO, self._process.stdout)
        self._greeted = False
        self._reaping = threading.Lock()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._drain = threading.Thread(
            target=self._read_stderr,
            args=(self._process.stderr,),
            name="warmgraph-stderr",
            daemon=True,
        )
        self._drain.start()

    def send(self, message: dict[str, Any]) -> None:
        """Write one message; may block while the worker does not read.

        Raises:
            DeadWorkerError: the worker is gone.
            ProtocolError: the message is not plain JSON data; nothing was written.
        """
        try:
            write_message(self._stdin, message)
        except OSError as error:
            raise DeadWorkerError(self._obituary()) from error

    def receive(self) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            DeadWorkerError: the stream ended, or held something else than messages.
        """
        try:
            if not self._greeted:
                self._greeted = skip_noise(self._stdout)
            message = read_message(self._stdout) if self._greeted else None
        except (OSError, ProtocolError) as error:
            self.kill()
            raise DeadWorkerError(self._obituary()) from error
        if message is None:
            raise DeadWorkerError(self._obituary())
        return message

    def receive_bytes(self, count: int) -> bytes:
        """Wait for bytes that follow a message.

        Raises:
            DeadWorkerError: the stream ended before.
        """
        data = self._stdout.read(count)
        if len(data) < count:
            raise DeadWorkerError(self._obituary())
        return data

    def alive(self) -> bool:
        """Say whether the process runs."""
        return not self._reap(0.0)

    def kill(self) -> None:
        """Kill the process and the compilers that it started, without waiting."""
        with self._reaping, contextlib.suppress(OSError):
            if self._process.returncode is not None:
                return  # its number may be another process's by now
            # A worker makes itself the leader of a group; before that it has started nothing.
            if sys.platform != "win32" and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, signal.SIGKILL)
            if self._job is not None:
                self._job.end()
            self._process.kill()

    def end(self, *, grace_s: float = 0.0) -> None:
        """Let the process go, kill it after the grace, and remove its cache."""
        if grace_s > 0:
            with contextlib.suppress(OSError):
                self._stdin.close()
            self._reap(grace_s)
        self.kill()
        self._reap(10.0)
        for stream in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                stream.close()
        end_processes_of([self.cache])  # a compiler in a session of its own was in no group
        self._clear_up()

    def _clear_up(self) -> None:
        temporary.remove(self.cache)
        if self._keeper:
            self._keeper.release(self.cache)

    def _reap(self, timeout_s: float) -> bool:
        """Wait for the process's end and kill what it started; False when the time is over."""
        until = time.monotonic() + timeout_s
        while True:
            with self._reaping:
                ended = self._process.returncode is not None
                if not ended and self._process.poll() is not None:
                    ended = True
                    if sys.platform != "win32":
                        with contextlib.suppress(OSError):
                            os.killpg(self.pid, signal.SIGKILL)
                    elif self._job is not None:
                        self._job.end()
            if ended or time.monotonic() >= until:
                return ended
            time.sleep(0.01)

    def _obituary(self) -> str:
        """Say how the process ended and what it said last; kills it if it has not ended."""
        if not self._reap(2.0):
            self.kill()
            self._reap(10.0)
        end_processes_of([self.cache])  # a compiler that lives on holds the stream open
        self._drain.join(_LAST_WORDS_S)
        words = last_words(list(self._lines))
        how = exit_words(self._process.returncode)
        return of("last_words", how=how, words=words) if words else how

    def _read_stderr(self, stream: IO[bytes]) -> None:
        rest = b""
        while chunk := os.read(stream.fileno(), 1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            self._lines.extend(
                line[:_LINE_CHARACTERS].decode("utf-8", "replace").rstrip()
                for line in lines[-_KEPT_LINES:]
            )
            rest = rest[-_LINE_CHARACTERS:]
        self._lines.append(rest.decode("utf-8", "replace").rstrip())
        stream.close()


class Keeper:
    """The server's end of the process that clears up if the server is killed (`keeper.py`).

    There is one as long as there are workers. Safe to use from any thread.
    """

    def __init__(self) -> None:
        """Set up; nothing is started yet."""
        self._lock = threading.Lock()
        self._folders: set[Path] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._warned = False

    def watch(self, folder: Path) -> None:
        """Have a worker's cache folder cleared up; never raises."""
        if not sys.platform.startswith("linux"):
            return  # workers look after their server themselves there
        with self._lock:
            self._folders.add(folder)
            if self._process is not None and self._process.poll() is None:
                return
            words = (KEEPER.resolve(), os.getpid(), folder.parent, owners.me())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", *map(str, words)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=os.sep,
                    start_new_session=True,  # a signal to the server's whole group is not for it
                )
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "If this server is killed, what its workers do may go on: %s", error
                    )

    def release(self, folder: Path) -> None:
        """Have a folder left alone; with the last one the process ends. Never raises."""
        with self._lock:
            self._folders.discard(folder)
            if self._folders or self._process is None:
                return
            process, self._process = self._process, None
            try:
                process.communicate(b".", _KEEPER_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def exit_words(returncode: int | None) -> Reason:
    """Say in words how a process ended."""
    if returncode is None:
        return of("does_not_end")
    if returncode == -9:
        return of("killed")
    if returncode < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-returncode).name
            return of("signal", number=-returncode, name=name)
    if returncode > 255:  # Windows: an exception's code, 0xC0000005 is an access violation
        return of("exit_code", code=f"0x{returncode & 0xFFFFFFFF:08X}")
    return of("exit_code", code=returncode)


def last_words(lines: Sequence[str]) -> str:
    """Return the last line that names an error, else the last that is not empty."""
    spoken = [line.strip() for line in lines if line.strip()]
    named = [line for line in spoken if _ERROR_LINE.search(line)]
    return (named or spoken or [""])[-1]


def sweep_aside(spool: Path) -> None:
    """Sweep in a thread of its own, beside the first builds: folders that were left may be large,
    and their programs stubborn. Without room for a thread, the next start does it.
    """
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=sweep, args=(spool,), name="warmgraph-sweep", daemon=True).start()


def sweep(spool: Path) -> None:
    """Remove what killed processes left behind, and what is to be tried anew now and then: what
    workers remember once it is two days old.
    """
    temporary.sweep()
    before = time.time() - temporary.STALE_SECONDS
    with contextlib.suppress(OSError):
        for path in spool.glob(f"*{REMEMBERED}"):
            if path.lstat().st_mtime < before:
                path.unlink()


def _environment(base: Mapping[str, str], cache: Path, threads: int) -> dict[str, str]:
    """Return a worker's environment: caches and scratch of its own, few threads, no inner pools."""
    scratch = cache / "tmp"
    scratch.mkdir()
    return {
        **base,
        VARIABLE: str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "t"),  # see `torch_api.kernel_names`
        "TRITON_DISABLE_LINE_INFO": "1",  # paths, and so a user's name, in files that are shared
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "TMPDIR": str(scratch),
        "TEMP": str(scratch),
        "TMP": str(scratch),
    }


def _interpreter_flags() -> list[str]:
    """Repeat the flags that decide where this interpreter finds its packages, and no others; and
    have it write UTF-8: an isolated one, as in the portable version for Windows, is not told so by
    its environment, and a path in Chinese would end it.
    """
    flags = ["-X", "utf8"]
    if sys.flags.isolated:
        flags.append("-I")
    else:
        if sys.flags.no_user_site:
            flags.append("-s")
        if sys.flags.ignore_environment:
            flags.append("-E")
    if sys.flags.no_site:
        flags.append("-S")
    return flags


def _job_of(process: subprocess.Popen[bytes]) -> JobObject | None:
    """Under Windows, what ends a worker and its compilers with this server, or before it. A worker
    is asked for nothing yet, so it has started nothing.
    """
    if sys.platform == "win32":
        try:
            job = JobObject()
            job.add(int(process._handle))
        except OSError as error:
            logger.warning("If this server is killed, what its workers do may go on: %s", error)
            return None
        return job
    else:
        return None


def _creation_flags() -> int:
    if sys.platform == "win32":
        return subprocess.BELOW_NORMAL_PRIORITY_CLASS | subprocess.CREATE_NO_WINDOW
    else:
        return 0  # the worker lowers its own priority: `preexec_fn` is unsafe among threads
