"""A worker of a build farm: a dask.distributed worker whose process builds nothing itself.

Dask can neither stop a running task nor limit its time, so the task waits for a local builder that
has one worker process. The asking server sends its job and the options that say how its host
computes; ComfyUI, PyTorch and folders are this machine's.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from distributed import Reschedule, Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from ..cleanup import temporary
from ..compilers.installed import installed_target
from ..compilers.registry import COMPILERS
from ..device.kinds import GPU_TYPES
from ..errors import BuildError
from ..storing.canonical_json import canonical_json
from .builder import Builder
from .contract import BuildResult, Job
from .farm_messages import TARGETS, answer, facts_of, resource_of
from .worker_process import Keeper

logger = logging.getLogger(__name__)

#: How long a build process waits for the next job: it takes seconds to start.
_IDLE_S = 120.0
_COMPILERS = [each.name for each in COMPILERS]


def build(job: dict[str, Any], hello: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Build one job on the worker that runs this; what dask is asked to call.

    Args:
        job: the fields of a `Job`.
        hello: `portable_arguments` of the server that asks.
        limit_s: seconds that it may take.

    Raises:
        RuntimeError: this machine has not built it; the text says why.
        Reschedule: the worker is closing.
    """
    plugin = get_worker().plugins[FarmWorker.name]
    assert isinstance(plugin, FarmWorker)
    return answer(plugin.build(Job(**job), hello, limit_s))


class FarmWorker(WorkerPlugin):
    """What a dask worker builds with. Dask runs one `build` at a time, in a thread of its own."""

    name = "warmgraph"

    def __init__(self, host: Path, spool: Path, script: Path | None = None) -> None:
        """Set up; no process starts before the first job. See `serve`."""
        self._host, self._spool, self._script = host, spool, script
        #: One for each way in which servers' hosts compute.
        self._builders: dict[str, Builder] = {}
        self._limit_s = 0.0
        #: Why this machine builds nothing, once that is known.
        self.verdict: BuildError | None = None

    def teardown(self, worker: Worker) -> None:
        """Called by dask when the worker ends, in its event loop."""
        for builder in self._builders.values():
            builder.close()

    def build(self, job: Job, hello: dict[str, Any], limit_s: float) -> BuildResult:
        """Build a job; see `build`."""
        logger.info("Builds %s", job.label)
        builder, self._limit_s = self._builder_for(hello), limit_s
        try:
            result = builder.submit(job).result()
        except BuildError as error:
            if builder.closed:
                raise Reschedule() from error
            logger.info("%s was not built: %s", job.label, error.told)
            self.verdict = builder.verdict
            if self.verdict is not None:  # others are to have what this machine would fail
                worker = get_worker()
                worker.loop.add_callback(worker.close, reason="builds nothing")
            raise RuntimeError(f"{job.label}: {error.told}") from None
        logger.info("%s is built, %.1f s", job.label, result.seconds)
        return result

    def _builder_for(self, hello: dict[str, Any]) -> Builder:
        name = canonical_json(hello)
        if name not in self._builders:
            self._builders[name] = Builder(
                hello={**hello, "host": str(self._host), "cwd": str(self._host)},
                spool=self._spool,
                workers=lambda: 1,
                time_limit_s=lambda: self._limit_s,
                idle_s=_IDLE_S,
                script=self._script,
            )
        return self._builders[name]


def serve(
    scheduler: str,
    host: Path,
    *,
    say: Callable[[str], None] = logger.info,
    script: Path | None = None,
    **options: Any,
) -> str | None:
    """Work for a scheduler, with the certificates of dask's own configuration, until it is gone or
    this process is told to end.

    Args:
        scheduler: its address, such as tls://HOST:8786.
        host: the folder of the ComfyUI tree.
        say: is told when this worker is there.
        script: see `Builder`.
        options: of dask's `Worker`: "name" and "port".

    Returns:
        Why it ended, unless it was told to.

    Raises:
        OSError: the scheduler is not reached.
    """
    targets, cards = _targets(host), (False, True)
    resources = [resource_of(facts_of(e, host, pretended=card)) for e in targets for card in cards]
    with temporary.made("farm") as folder:
        spool = folder / "spool"
        spool.mkdir()
        keeper = Keeper()
        keeper.watch(folder)
        plugin = FarmWorker(host, spool, script)
        make = partial(
            Worker,
            scheduler,
            nthreads=1,
            memory_limit=0,  # builds are other processes
            dashboard=False,
            local_directory=str(folder),
            plugins=(plugin,),
            resources=dict.fromkeys(resources, 1),
            startup_information={TARGETS: lambda _worker: targets},
            **options,
        )
        try:
            was_told = asyncio.run(_serve(make, scheduler, say))
        finally:
            keeper.release(folder)
    if plugin.verdict is not None:
        return f"nothing can be built here: {plugin.verdict.told}"
    return None if was_told else f"{scheduler} is gone"


async def _serve(make: Callable[[], Worker], scheduler: str, say: Callable[[str], None]) -> bool:
    """Run a worker until it ends; returns whether it was told to."""
    worker, told = await make(), asyncio.Event()
    if sys.platform != "win32":  # Ctrl+C ends the loop there
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
    say(f"builds for {scheduler} as {worker.name}, at {worker.address}")
    ends = [asyncio.ensure_future(each) for each in (worker.finished(), told.wait())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await worker.close(reason="told to end")
    return told.is_set()


def _targets(host: Path) -> list[dict[str, Any]]:
    """Return what graphs that are built here are made for."""
    every = (installed_target(*each) for each in product(("cpu", *sorted(GPU_TYPES)), _COMPILERS))
    return [facts_of(target, host, pretended=False) for target in every if target is not None]
