"""A worker of a build farm: a dask.distributed worker whose process builds nothing itself.

Dask cannot stop a task that runs. So the task waits for a builder of this machine with one worker
process of ours, which is killed when the job is cancelled or takes too long. What is used of the
asking server is its job and the options that say how its host computes; ComfyUI, PyTorch and
folders are this machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import cache
from pathlib import Path
from typing import Any

from distributed import Reschedule, Security, Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from ..cleanup import temporary
from ..compilers.installed import installed_target
from ..errors import BuildError, CancelledBuildError
from ..reasons import Reason, of
from ..target.target import explain_target
from .builder import Builder
from .contract import Job
from .farm_messages import TOPIC, Ask, built, failed
from .worker_process import Keeper

logger = logging.getLogger(__name__)

_PLUGIN = "warmgraph"
#: How long a build process waits for the next job: it takes seconds to start.
_IDLE_S = 120.0
#: Failures that say something of this machine, not of the graph.
_OF_MACHINE = {
    "farm_unlike",
    "other_torch",
    "other_host_code",
    "nothing_compiles",
    "broke_here",
    "no_workers",
    "worker_no_start",
    "worker_died_early",
    "worker_not_ready",
    "worker_thread_failed",
}


def build(ask: Ask) -> dict[str, Any]:
    """Build one job on the worker that runs this; what dask is asked to call.

    Raises:
        Reschedule: the worker is closing: another takes the job.
    """
    plugin = get_worker().plugins[_PLUGIN]
    assert isinstance(plugin, FarmWorker)
    return plugin.build(ask)


class FarmWorker(WorkerPlugin):
    """What a dask worker builds with. Dask runs one `build` at a time, in a thread of its own, and
    everything else in the thread of its event loop.
    """

    name = _PLUGIN

    def __init__(self, host: Path, spool: Path, script: Path | None = None) -> None:
        """Set up; no process starts before the first job.

        Args:
            host: the folder of the ComfyUI tree.
            spool: a private folder for results.
            script: see `Builder`.
        """
        self._host = host
        self._script = script
        self._spool = spool
        self._address = ""
        self._tell: Callable[[str, dict[str, str]], None] = lambda _topic, _event: None
        self._lock = threading.Lock()
        self._builder: Builder | None = None
        self._hello: dict[str, Any] = {}
        self._limit_s = 0.0
        self._current = ""
        self._cancelled = False
        self._closing = False

    def setup(self, worker: Worker) -> None:
        """Called by dask at the worker's start."""
        self._address = worker.address
        self._tell = worker.log_event

    def teardown(self, worker: Worker) -> None:
        """Called by dask when the worker ends, in its event loop."""
        with self._lock:
            self._closing = True
            builder = self._builder
        if builder is not None:
            builder.close()

    def transition(self, key: Any, start: str, finish: str, **_more: Any) -> None:
        """Called by dask when a task changes its state: one that runs and is not wanted is
        killed.
        """
        if start != "executing" or finish != "released":
            return
        with self._lock:
            if key != self._current:
                return
            self._cancelled = True
            builder = self._builder
        if builder is not None:
            builder.cancel()

    def build(self, ask: Ask) -> dict[str, Any]:
        """Build a job, in dask's thread for tasks."""
        with self._lock:
            self._current, self._cancelled = ask["name"], False
        try:
            return self._build(ask)
        except CancelledError:
            return failed(self._address, CancelledBuildError(), unfit=False)
        except BuildError as error:
            if self._closing:
                raise Reschedule() from error
            logger.info("%s was not built: %s", ask["label"], error.told)
            unfit = error.final or error.reason.key in _OF_MACHINE
            return failed(self._address, error, unfit=unfit)
        finally:
            with self._lock:
                self._current = ""

    def _build(self, ask: Ask) -> dict[str, Any]:
        differing = _differences(ask)
        if differing:
            raise BuildError(of("farm_unlike", why=differing))
        self._tell(TOPIC, {"name": ask["name"], "worker": self._address})
        logger.info("Builds %s", ask["label"])
        builder = self._builder_for(ask)
        future = builder.submit(Job(ask["key"], ask["label"], ask["cost"], ask["task"]))
        with self._lock:
            cancelled, closing = self._cancelled, self._closing
        if closing:
            builder.close()
        elif cancelled:
            builder.cancel()
        result = future.result()
        logger.info("%s is built, %.1f s", ask["label"], result.seconds)
        return built(self._address, result.payload, result.facts, result.seconds)

    def _builder_for(self, ask: Ask) -> Builder:
        """The builder for a host that computes so; a server with another one ends it."""
        with self._lock:
            self._limit_s = ask["limit_s"]
            before = self._builder
            if before is not None and (self._hello == ask["hello"] or self._closing):
                return before
        if before is not None:
            before.close()
        made = Builder(
            hello={**ask["hello"], "host": str(self._host), "cwd": str(self._host)},
            spool=self._spool,
            workers=lambda: 1,
            time_limit_s=lambda: self._limit_s,
            idle_s=_IDLE_S,
            script=self._script,
        )
        with self._lock:
            self._builder, self._hello = made, ask["hello"]
        return made


def serve(
    scheduler: str,
    host: Path,
    *,
    name: str | None = None,
    port: int = 0,
    security: Security | None = None,
    say: Callable[[str], None] = logger.info,
    script: Path | None = None,
) -> bool:
    """Work for a scheduler until it is gone, or this process is told to end.

    Args:
        scheduler: its address, such as tls://HOST:8786.
        host: the folder of the ComfyUI tree.
        name: of this worker at the scheduler, which must be its only one; None: its address.
        port: that this worker listens at; 0: any.
        security: certificates; None: as dask's own configuration says.
        say: is told when this worker is there.
        script: see `Builder`.

    Returns:
        Whether it was told to end.

    Raises:
        OSError: the scheduler is not reached.
    """
    with temporary.made("farm") as folder:
        spool = folder / "spool"
        spool.mkdir()
        keeper = Keeper(spool)
        keeper.watch(folder)
        plugin = FarmWorker(host, spool, script)
        try:
            return asyncio.run(_serve(scheduler, plugin, folder, name, port, security, say))
        finally:
            keeper.release(folder)


async def _serve(
    scheduler: str,
    plugin: FarmWorker,
    folder: Path,
    name: str | None,
    port: int,
    security: Security | None,
    say: Callable[[str], None],
) -> bool:
    worker = await Worker(
        scheduler,
        nthreads=1,
        name=name,
        port=port,
        local_directory=str(folder),
        memory_limit=0,  # builds are other processes
        dashboard=False,
        security=security,
        plugins=(plugin,),
    )
    ending: list[asyncio.Task[Any]] = []

    def end() -> None:
        if not ending:
            ending.append(asyncio.create_task(worker.close(reason="told to end")))

    if sys.platform != "win32":  # Ctrl+C ends the loop there
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end)
    say(f"builds for {scheduler} as {worker.name}, at {worker.address}")
    await worker.finished()
    for task in ending:
        with contextlib.suppress(Exception):
            await task
    return bool(ending)


def _differences(ask: Ask) -> list[Reason]:
    """Say what differs between a server's target and this machine's, by installed files."""
    theirs = ask["target"]
    ours = _installed(str(theirs["device"]), str(theirs["backend"]))
    if ours is None:
        return []  # the build says it
    # What the server's options decide, they decide here, too.
    decided = ["deterministic", *(["capability"] if ask["hello"]["pretended"] else [])]
    return explain_target(theirs, ours | {name: theirs.get(name) for name in decided})


@cache
def _installed(device: str, backend: str) -> dict[str, Any] | None:
    return installed_target(device, backend)
