"""A build farm: workers of a dask.distributed scheduler take a builder's jobs; this machine builds
the rest.

A task's key is its graph's, so dask builds it once however many servers ask. It is sent when a
worker may have room, and is never cancelled. Only names of functions and plain data are sent, no
code. But dask's messages are pickles, and a job holds source text that a worker runs: whoever
reaches the scheduler can run programs on every machine of the farm, this one included.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pkgutil
import threading
import time
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from ..compilers.registry import backend_named
from ..errors import CancelledBuildError
from ..events import Events
from ..host_api.process import portable_arguments
from ..reasons import of
from ..target import keys
from ..target.target import explain_target
from .builder import Builder
from .farm_messages import BUILD, TARGETS, facts_of, read, resource_of
from .jobs import Entry

logger = logging.getLogger(__name__)

#: The scheduler's address, such as tls://HOST:8786; dask's own variables name certificates. Only
#: `cli.py prebuild` sets it. It is no setting: whoever chooses it runs programs here.
VARIABLE = "WARMGRAPH_SCHEDULER"
#: How long a scheduler may take to answer, and to be there again once it was lost.
PATIENCE_S = 10.0
#: How long jobs wait for a farm without a worker that may take them.
NOBODY_S = 30.0
#: How often dask has a job built again that a worker could not build.
_RETRIES = 1
_LOOK_S = 2.0
_RESULT_S = 60.0


def make_builder(
    *, hello: dict[str, Any], time_limit_s: Callable[[], float], events: Events, **more: Any
) -> Builder:
    """Make the builder of this process, with a build farm where one is named.

    Args:
        See `Builder`.
    """
    builder = Builder(hello=hello, time_limit_s=time_limit_s, events=events, **more)
    scheduler = os.environ.get(VARIABLE, "")
    if scheduler and hello:  # nothing is built without the host
        host, portable = Path(hello["host"]), portable_arguments(hello)
        try:
            Farm(scheduler, builder, host=host, hello=portable, time_limit_s=time_limit_s)
        except (ImportError, OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            logger.warning("Build farm %s is not reached, so all is built here: %s", scheduler, why)
    return builder


class Farm:
    """Has a builder's jobs built by other machines, for as long as the builder lives."""

    def __init__(
        self,
        scheduler: str,
        builder: Builder,
        *,
        host: Path,
        hello: dict[str, Any],
        time_limit_s: Callable[[], float],
        nobody_s: float = NOBODY_S,
    ) -> None:
        """Connect, with the certificates of dask's own configuration, and begin to take jobs.

        Args:
            scheduler: its address.
            builder: builds what the farm does not; Futures of what it does end in dask's threads.
            host: the folder of this server's ComfyUI tree.
            hello: its `portable_arguments`.
            time_limit_s: seconds that a job may take, asked for each job.
            nobody_s: seconds that jobs wait while no worker may take them.

        Raises:
            ImportError: dask.distributed is not installed.
            OSError: the scheduler is not reached.
            ValueError: it is no address.
        """
        from distributed import Client

        self._client: Any = Client(
            scheduler, name="warmgraph", timeout=PATIENCE_S, set_as_default=False
        )
        self._scheduler, self._builder = scheduler, builder
        self._host, self._hello = host, hello
        self._time_limit_s, self._nobody_s = time_limit_s, nobody_s
        self._workers: dict[str, dict[str, Any]] = {}
        #: When a worker with each resource was last there; with any, by the name of all.
        self._seen = {TARGETS: time.monotonic()}
        self._looked = 0.0
        self._lack = ""
        #: What is at the farm: its task, and the resource that it needs.
        self._sent: dict[Entry, tuple[Any, str]] = {}
        self._said: set[str] = set()
        builder.elsewhere = 0
        threading.Thread(target=self._run, name="warmgraph-farm", daemon=True).start()

    def _run(self) -> None:
        while not self._builder.closed:
            self._look()
            entry = self._builder.take(_LOOK_S, lent=True, may_have=self._may_have)
            if entry is not None:
                try:
                    self._send(entry)
                except Exception as error:
                    self._take_back(entry, f"it takes no jobs ({error!r})")
        with contextlib.suppress(Exception):
            self._client.close(timeout=PATIENCE_S)

    def _look(self) -> None:
        """See who is there, every two seconds, and take back what nobody of the farm may build."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        try:
            asking = self._client.scheduler.identity
            found = self._client.sync(asking, n_workers=-1, callback_timeout=PATIENCE_S)["workers"]
            self._workers = {each: worker for each, worker in found.items() if TARGETS in worker}
            self._lack = "it has no workers"
        except Exception as error:
            self._workers, self._seen = {}, {}
            self._lack = f"its scheduler does not answer ({error or type(error).__name__})"
        self._looked = now = time.monotonic()
        self._builder.elsewhere = len(self._workers)
        for worker in self._workers.values():
            self._seen.update(dict.fromkeys([TARGETS, *worker["resources"]], now))
        for entry, (remote, resource) in list(self._sent.items()):
            if self._is_deserted(resource) and self._sent.pop(entry, None) is not None:
                remote.release()
                self._take_back(entry, self._lack)

    def _is_deserted(self, resource: str) -> bool:
        """Whether no worker with a resource was seen for too long."""
        return time.monotonic() - self._seen.get(resource, float("-inf")) > self._nobody_s

    def _may_have(self) -> bool:
        """Whether a job may be sent, or is to be taken back at once."""
        return len(self._sent) < len(self._workers) or self._is_deserted(TARGETS)

    def _send(self, entry: Entry) -> None:
        from toolz import compose

        job = entry.job
        if self._is_deserted(TARGETS):
            self._take_back(entry, self._lack)
            return
        device, backend = job.task["description"]["device"], backend_named(job.task["backend"])
        target, pretended = keys.target(device, backend), bool(self._hello["pretended"])
        facts = facts_of(target, self._host, pretended=pretended)
        resource = resource_of(facts)
        if not self._is_built_for(facts, resource):
            self._take_back(entry, "none of its workers is like this machine")
            return
        # Folders and numbers of cards are this machine's.
        task = {name: value for name, value in job.task.items() if name != "dump"}
        sent = vars(job) | {"task": task | {"card": 0}}
        called = methodcaller("__call__", sent, self._hello, self._time_limit_s())
        # Whoever unpickles it needs the standard library and toolz alone, the scheduler, too; the
        # worker finds the function by its name.
        remote = self._client.submit(
            compose(called, pkgutil.resolve_name),
            BUILD,
            key=f"warmgraph-{job.key}",
            resources={resource: 1},
            priority=job.cost,
            retries=_RETRIES,
        )
        self._sent[entry] = remote, resource
        remote.add_done_callback(partial(self._arrived, entry))

    def _is_built_for(self, facts: dict[str, Any], resource: str) -> bool:
        """Whether any worker is like this machine; says how the others differ."""
        alike = False
        for address, worker in self._workers.items():
            if resource in worker["resources"]:
                alike = True
                continue
            for theirs in worker[TARGETS]:
                if all(theirs[name] == facts[name] for name in ("device", "backend")):
                    differing = explain_target({name: theirs.get(name) for name in facts}, facts)
                    why = of("farm_unlike", why=differing)
                    self._say(f"{address} builds nothing for this server: {why}")
        return alike

    def _arrived(self, entry: Entry, remote: Any) -> None:
        """Take what the farm has made of a job; in a thread of dask's."""
        if self._sent.pop(entry, None) is None:
            return  # taken back meanwhile
        try:
            if remote.cancelled():
                raise ConnectionError("its scheduler is gone")
            result = read(entry.job.key, remote.result(timeout=_RESULT_S))
        except (Exception, asyncio.CancelledError) as error:
            self._take_back(entry, str(error) or type(error).__name__)
        else:
            self._builder.finish(entry, result)
        remote.release()

    def _take_back(self, entry: Entry, why: str) -> None:
        """Have a job built here."""
        self._say(f"what it was asked for is built here: {why}")
        if not self._builder.put_back(entry):
            self._builder.finish(entry, CancelledBuildError())

    def _say(self, what: str) -> None:
        """Tell the log something of the farm, once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("Build farm %s: %s", self._scheduler, what)
