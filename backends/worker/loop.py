"""The worker's end: take jobs one at a time, answer, and never outlive the builder."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Protocol

from ..building.messages import MARK, encode_message, read_message
from ..cleanup.job_object import JobObject
from ..cleanup.keeper import VARIABLE
from ..cleanup.temporary import owner_of
from ..errors import BrokenWorkerError, WarmgraphError
from ..reasons import Reason

if TYPE_CHECKING:
    from ..storing.graph_file import CompressedPayload

Measure = Callable[[], AbstractContextManager[None]]
TRACE_CHARACTERS = 12_000
_PR_SET_PDEATHSIG = 1


class RunBuild(Protocol):
    """Builds one graph: `run(task, measure=...)` -> (raw payload, facts as JSON-plain data)."""

    def __call__(
        self, task: dict[str, Any], *, measure: Measure
    ) -> tuple[bytes, dict[str, Any]]: ...


def serve(prepare: Callable[[dict[str, Any]], None], run: RunBuild) -> NoReturn:
    """Serve jobs until the builder closes the pipe or dies, then end the process.

    Takes the process over: standard streams, priority, process group, garbage and exit. Call it
    first, and from the main thread.

    Args:
        prepare: called once with the builder's hello, before the first job is asked for.
        run: called for each job; whatever it raises fails that job only.
    """
    _end_with_server()
    _step_back()
    gc.disable()  # saves a quarter of the imports' time, a tenth of a build's; collected in between
    channel = _Channel()
    hello = channel.receive()
    started = time.monotonic()
    try:
        prepare(hello)
        from ..storing.graph_file import compress_payload
    except BaseException as error:  # the outermost frame: every error becomes text
        told = _told(error)
        channel.send({**told, "unfit": told["error"]})
        channel.wait_for_the_end()
    gc.freeze()
    channel.send({"ready": os.getpid(), "seconds": round(time.monotonic() - started, 3)})
    while True:
        message = channel.receive()
        channel.send_frame(_do(channel, run, compress_payload, message))
        gc.collect()
        gc.freeze()


def _do(
    channel: _Channel,
    run: RunBuild,
    compress: Callable[[bytes], CompressedPayload],
    message: dict[str, Any],
) -> bytes:
    """Run one job; returns the frame of its answer."""
    number = message["job"]
    gate = _Gate(channel)
    started = time.monotonic()
    try:
        raw, facts = run(message["task"], measure=gate.measure)
        payload = compress(raw)
        answer = encode_message(
            {
                "job": number,
                "ok": True,
                "sha256": payload.sha256,
                "packed_bytes": len(payload.data),
                "raw_bytes": payload.raw_bytes,
                "facts": facts,
                "seconds": round(time.monotonic() - started - gate.waited, 3),
            }
        )
        return answer + payload.data
    except BaseException as error:  # no exception of a job may end its worker
        clean = _is_clean(error)
        return encode_message({"job": number, "ok": False, **_told(error), "clean": clean})


class _Channel:
    """Messages from and to the builder, on private copies of stdin and stdout.

    Compilers print to stdout and start programs that inherit both streams: fd 1 becomes stderr,
    fd 0 the null device.
    """

    def __init__(self) -> None:
        incoming: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._outgoing: BinaryIO = os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._outgoing.write(MARK)
            self._outgoing.flush()
        threading.Thread(
            target=self._listen, args=(incoming,), name="warmgraph-listener", daemon=True
        ).start()

    def send(self, message: dict[str, Any]) -> None:
        self.send_frame(encode_message(message))

    def send_frame(self, frame: bytes) -> None:
        try:
            with self._lock:
                self._outgoing.write(frame)
                self._outgoing.flush()
        except OSError:
            self.leave(1)

    def receive(self) -> dict[str, Any]:
        return self._inbox.get()

    def wait_for_the_end(self) -> NoReturn:
        """Take no more messages; the listener ends the process when the builder releases it."""
        while True:
            self._inbox.get()

    def leave(self, status: int) -> NoReturn:
        """End this process, with the compilers that it started."""
        if sys.platform != "win32" and os.getpgid(0) == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(status)

    def _listen(self, incoming: BinaryIO) -> None:
        # Also while a job runs: the pipe ends with the builder.
        try:
            while (message := read_message(incoming)) is not None:
                self._inbox.put(message)
        finally:
            self.leave(0)


class _Gate:
    """Asks the builder before kernels are measured on the GPU; nested uses ask once."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._lock = threading.RLock()
        self._depth = 0
        self.waited = 0.0

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        with self._lock:
            if self._depth == 0:
                asked = time.monotonic()
                self._channel.send({"measure": "begin"})
                self._channel.receive()
                self.waited += time.monotonic() - asked
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._channel.send({"measure": "end"})


def _told(error: BaseException) -> dict[str, Any]:
    """What the builder is told of an error."""
    known = error if isinstance(error, WarmgraphError) else WarmgraphError(Reason(one_line(error)))
    trace = "".join(traceback.format_exception(error))[-TRACE_CHARACTERS:]
    reason, remedy = known.reason.to_plain(), known.remedy.to_plain()
    return {"error": reason, "remedy": remedy, "final": known.final, "trace": trace}


def _is_clean(error: BaseException) -> bool:
    """Tell whether the next job finds a clean process, as after any exception of a compiler's
    or of the host's code, but not with a broken card, or where memory lacks.
    """
    of_card = getattr(sys.modules.get("torch"), "AcceleratorError", MemoryError)
    spoiling = (BrokenWorkerError, MemoryError, of_card)
    return isinstance(error, Exception) and not isinstance(error, spoiling)


def one_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text, for a report."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return f"{name}: {text}"[:400] if text else name


def _end_with_server() -> None:
    """Have Linux kill this process when its server ends, because a library call that holds the
    interpreter stops all threads. The keeper ends the processes that it started.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    server = owner_of(Path(os.environ.get(VARIABLE, "")).name)
    if server is not None and os.getppid() != server.pid:
        os._exit(0)  # it ended before the request


def _step_back() -> None:
    """Give way to the server: in processor time, in memory, and with the terminal's Ctrl+C."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "win32":  # the priority class was given at creation
        # Its compilers end with it, for the handle is open until then. The server's own job does
        # not hold them where a virtual environment's launcher stands between the two processes.
        with contextlib.suppress(OSError):
            JobObject().add()
    else:
        # A process group of its own, so that the compilers it starts can be killed with it. Not a
        # session: Linux weighs niceness only inside a session (sched(7), "The autogroup feature").
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        with contextlib.suppress(OSError):
            os.nice(19)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("500")
