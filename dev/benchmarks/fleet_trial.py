"""What a bucket costs a large fleet: the remote store's own code over one bucket in memory, which
is slow, loses requests or refuses those above a rate.

    python -m dev.benchmarks.fleet_trial [ROW ...] [--workers N] [--builders N] [--out FOLDER]

Each worker has a store, a remote, claims and graphs of its own, as servers have. Only the compiler
is a stand-in: it takes a given time, and gives the bytes of a real file. All workers share one
process; those that are warm end, so that their threads do.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if "warmgraph_backends" not in sys.modules:
    sys.path.insert(0, str(HERE.parents[1] / "backends" / "worker"))
    from main import adopt_package

    adopt_package()

from fsspec import AbstractFileSystem, register_implementation  # noqa: E402

from warmgraph_backends.building.contract import BuildResult, Job  # noqa: E402
from warmgraph_backends.contract import Compiled, RegionSpec, Requirement  # noqa: E402
from warmgraph_backends.events import Events  # noqa: E402
from warmgraph_backends.fleet.claims import FleetClaims  # noqa: E402
from warmgraph_backends.fleet.remote import MISSED_S, Remote  # noqa: E402
from warmgraph_backends.fleet.settings import READ, WRITE, FleetSettings  # noqa: E402
from warmgraph_backends.graphs.compiled_graph import CompiledGraph, State  # noqa: E402
from warmgraph_backends.graphs.library import Graphs  # noqa: E402
from warmgraph_backends.storing.graph_file import compress_payload  # noqa: E402
from warmgraph_backends.storing.signing import Signer  # noqa: E402
from warmgraph_backends.storing.store import Store  # noqa: E402
from warmgraph_backends.target.target import target_name  # noqa: E402

from .results import write_case  # noqa: E402

_LOOK_S = 0.1
#: At a request, by botocore.
_ATTEMPTS = 5
#: Of all graphs here.
_TARGET = {"device": "cpu"}
#: Workers that are started between two looks.
_AT_ONCE = 20


@dataclass(frozen=True)
class Row:
    """What is tried; times in seconds.

    Attributes:
        builders: how many of the workers may write and compile; the others only read.
        start_s: within which all workers start, evenly.
        build_s: of one graph; a machine compiles one at a time.
        latency_s: of each request.
        lost: the share of requests that fail, half of them after they were carried out.
        per_s: requests that are answered within a second; those above are refused. 0: all.
        run_s: from the begin of an image to that of the next, which asks for what is missing.
        missed_s: for how long what was missing is not asked for again, at first.
        limit_s: until the trial is ended.
    """

    workers: int = 1000
    builders: int = 50
    graphs: int = 8
    payload_bytes: int = 50_000
    start_s: float = 60.0
    build_s: float = 3.0
    latency_s: float = 0.02
    lost: float = 0.0
    per_s: int = 0
    run_s: float = 5.0
    missed_s: float = MISSED_S
    limit_s: float = 150.0


ROWS = {
    "plain": Row(),
    "far": Row(latency_s=0.1),
    "losses": Row(lost=0.01),
    "1000 a second": Row(per_s=1000),
    "200 a second": Row(per_s=200),
}


class Bucket:
    """Files in memory, and what each request for one costs."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._lock = threading.Lock()
        self._random = random.Random(0)
        self._files: dict[str, bytes] = {}
        self._seconds: Counter[int] = Counter()
        self.requests: Counter[str] = Counter()
        self.refused = self.lost = self.bytes = 0

    @property
    def busiest(self) -> int:
        """The most requests within a second."""
        return max(self._seconds.values(), default=0)

    def ask(self, kind: str, path: str, carry_out: Callable[[dict[str, bytes]], bytes]) -> bytes:
        """Carry a request out.

        Args:
            kind: what it is counted as.
            carry_out: takes the files, and returns the bytes that are sent.

        Raises:
            OSError: it was lost or refused, or what `carry_out` raises.
        """
        kind = " ".join((kind, *path.rpartition("/")[2].split(".")[1:]))
        time.sleep(self._row.latency_s)
        with self._lock:
            self.requests[kind] += 1
            second = int(time.monotonic())
            self._seconds[second] += 1
            if self._row.per_s and self._seconds[second] > self._row.per_s:
                self.refused += 1
                raise OSError("503 SlowDown: reduce your request rate")
            lost = self._random.random()
            if lost < self._row.lost / 2:
                self.lost += 1
                raise OSError("the connection was reset")
            sent = carry_out(self._files)
            self.bytes += len(sent)
            if lost < self._row.lost:
                self.lost += 1
                raise OSError("the connection was reset")
        return sent


class BucketFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """fsspec's way to a bucket: what the remote store asks of one. A request that is lost or
    refused is made again as botocore does, which s3fs goes by.
    """

    protocol = "memory"
    cachable = False

    def __init__(self, bucket: Bucket, **options: Any) -> None:
        super().__init__(**options)
        self._bucket = bucket

    def _ask(self, kind: str, path: str, carry_out: Callable[[dict[str, bytes]], bytes]) -> bytes:
        for attempt in range(_ATTEMPTS - 1):
            try:
                return self._bucket.ask(kind, path, carry_out)
            except (FileNotFoundError, FileExistsError):
                raise
            except OSError:
                time.sleep(random.random() * 2**attempt)
        return self._bucket.ask(kind, path, carry_out)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """List a folder; a bucket answers with a thousand names at once."""
        found: list[str] = []

        def carry_out(files: dict[str, bytes]) -> bytes:
            found[:] = [name for name in files if name.startswith(f"{path}/")]
            return b"".join(name.encode() for name in found)

        self._ask("list", path, carry_out)
        return found

    def get_file(self, rpath: str, lpath: str, callback: Any, **options: Any) -> None:
        """Copy a file to this machine."""

        def carry_out(files: dict[str, bytes]) -> bytes:
            if rpath not in files:
                raise FileNotFoundError(rpath)
            return files[rpath]

        data = self._ask("get", rpath, carry_out)
        callback.set_size(len(data))
        Path(lpath).write_bytes(data)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Write a file."""

        def carry_out(files: dict[str, bytes]) -> bytes:
            if mode == "create" and path in files:
                raise FileExistsError(path)
            files[path] = value
            return value

        self._ask("create" if mode == "create" else "put", path, carry_out)

    def rm_file(self, path: str) -> None:
        """Remove a file."""

        def carry_out(files: dict[str, bytes]) -> bytes:
            if files.pop(path, None) is None:
                raise FileNotFoundError(path)
            return b""

        self._ask("delete", path, carry_out)


class Plain:
    """A backend whose graphs are their own bytes."""

    name = "plain"

    def requirements(self, device: str) -> Sequence[Requirement]:
        """Need nothing."""
        return ()

    def needs_to_build(self, device: str) -> Sequence[Requirement]:
        """Need nothing for builds either."""
        return ()

    def fingerprint(self, device: str) -> dict[str, Any]:
        """Say nothing."""
        return {}

    def compile(self, program: Any, *, measure: Any) -> Compiled:
        """Compile nothing."""
        raise NotImplementedError("the builder of a trial compiles without it")

    def load(self, payload: bytes, card: int | None = None) -> Callable[[list[Any]], Any]:
        """Return what gives the bytes."""
        return lambda arguments: payload


class Compiler:
    """In the place of a builder: it takes its time, one graph after the other."""

    def __init__(self, row: Row, built: Callable[[str], None]) -> None:
        self._row, self._built = row, built
        self._free_at = 0.0

    def submit(self, job: Job) -> Future[BuildResult]:
        """Give a graph when its time has passed."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + self._row.build_s
        future: Future[BuildResult] = Future()

        def give() -> None:
            self._built(job.key)
            raw = random.Random(job.key).randbytes(self._row.payload_bytes)
            facts = {"weights": [], "work": 1.0, "binary_bytes": 0, "checks": [], "phases": {}}
            future.set_result(BuildResult(job.key, compress_payload(raw), facts, self._row.build_s))

        timer = threading.Timer(self._free_at - now, give)
        timer.daemon = True
        timer.start()
        return future


@dataclass
class Made:
    """What all workers compiled, and could have loaded."""

    row: Row
    bucket: Bucket
    lock: threading.Lock = field(default_factory=threading.Lock)
    builds: Counter[str] = field(default_factory=Counter)
    remote: Counter[str] = field(default_factory=Counter)
    needless: int = 0


class Worker:
    """A server without a host."""

    def __init__(self, root: Path, made: Made, builds: bool, key: Path) -> None:
        private = root / "private"
        private.mkdir(parents=True)
        shutil.copy2(key, private)
        self.builds, self._made = builds, made
        signer = Signer(private)
        store = Store(root / "store", signer, cap_bytes=lambda: 1 << 30, private=private)
        settings = FleetSettings(
            "memory://bucket/graphs",
            WRITE if builds else READ,
            options={"bucket": made.bucket},
        )
        self.remote = Remote(settings, store, signer, missed_s=made.row.missed_s)
        claims = FleetClaims(
            store.root, signer, self.remote, spool=store.spool, patience_s=lambda: 600.0
        )
        compiler: Any = Compiler(made.row, self._note)
        self._graphs = Graphs(store, compiler, claims, Events(), remote=self.remote)
        backend, module = Plain(), {"class": "trial:Block", "parameters": {}, "modules": []}
        self.wanted: list[CompiledGraph] = [
            self._graphs.graph(
                RegionSpec("trial", f"form{n}", f"block {n}", module, (), (), device="cpu"),
                backend,
                _TARGET,
            )
            for n in range(made.row.graphs)
        ]
        self.born = self.asked = 0.0
        self.remote.mirror(target_name(_TARGET))

    def run(self, now: float) -> None:
        """Begin an image: ask for what is missing."""
        self.born, self.asked = self.born or now, now
        self._graphs.request(self.wanted, [], build=self.builds)

    @property
    def is_warm(self) -> bool:
        """Whether all its graphs are loaded."""
        return all(graph.state is State.READY for graph in self.wanted)

    @property
    def is_sending(self) -> bool:
        """Whether graphs of its own are on their way."""
        return bool(self.remote.report()["sending"])

    def close(self) -> None:
        """End; what it has begun in its threads goes on, as the removal of a claim."""
        self._made.remote.update(self.remote.counts)
        self._graphs.close()

    def _note(self, key: str) -> None:
        with self._made.lock:
            self._made.needless += self._made.builds[key] > 0
            self._made.builds[key] += 1


@contextmanager
def bucket_scheme() -> Iterator[None]:
    """Have `memory://` lead to a trial's bucket."""
    import fsspec.implementations.memory as memory

    register_implementation("memory", BucketFileSystem, clobber=True)
    try:
        yield
    finally:
        register_implementation("memory", memory.MemoryFileSystem, clobber=True)


def trial(row: Row) -> dict[str, Any]:
    """Try a row; returns its figures."""
    bucket = Bucket(row)
    made = Made(row, bucket)
    every = max(1, row.workers // max(1, row.builders))
    temporary = tempfile.TemporaryDirectory(prefix="fleet-trial-", ignore_cleanup_errors=True)
    with bucket_scheme(), temporary as folder:
        root = Path(folder)
        key = root / "signing.key"
        Signer(root).fingerprint  # its key is made  # noqa: B018
        begun = time.monotonic()
        cpu = time.process_time()
        active: list[Worker] = []
        warm: list[tuple[float, float, bool]] = []  # when, after how long, whether it builds
        started = most = threads = 0
        all_started = 0.0
        while (now := time.monotonic()) - begun < row.limit_s:
            due = min(row.workers, int(row.workers * (now - begun) / row.start_s) + 1)
            for _ in range(min(due - started, _AT_ONCE)):
                builds = started % every == 0 and started // every < row.builders
                worker = Worker(root / str(started), made, builds, key)
                worker.run(time.monotonic())
                active.append(worker)
                started += 1
                all_started = time.monotonic() - begun
            left = []
            for worker in active:
                now = time.monotonic()
                if worker.is_warm:
                    if worker.born:
                        warm.append((now - begun, now - worker.born, worker.builds))
                        worker.born = 0.0
                    if worker.is_sending:
                        left.append(worker)
                    else:
                        worker.close()
                    continue
                if not worker.builds and now - worker.asked >= row.run_s:
                    worker.run(now)
                left.append(worker)
            most, threads = max(most, len(active)), max(threads, threading.active_count())
            active = left
            if started == row.workers and not active:
                break
            time.sleep(_LOOK_S)
        cold = sum(not worker.is_warm for worker in active)
        for worker in active:
            worker.close()
    waits = sorted(wait for _, wait, _ in warm)
    return {
        "row": asdict(row),
        "seconds_until_last_started": round(all_started, 1),
        "seconds_until_last_warm": round(max((when for when, _, _ in warm), default=0.0), 1),
        "seconds_median": round(waits[len(waits) // 2], 2) if waits else None,
        "seconds_longest": round(waits[-1], 1) if waits else None,
        "cold_at_the_end": cold,
        "requests": sum(bucket.requests.values()),
        "requests_by_kind": dict(bucket.requests.most_common()),
        "requests_busiest_second": bucket.busiest,
        "requests_refused": bucket.refused,
        "requests_lost": bucket.lost,
        "megabytes": round(bucket.bytes / 1e6, 1),
        "graphs_built": sum(made.builds.values()),
        "graphs_built_again": made.needless,
        "remote": dict(made.remote),
        "workers_at_once": most,
        "threads_at_once": threads,
        "processor_seconds": round(time.process_time() - cpu, 1),
    }


def main() -> int:
    """Try rows and write what they came to."""
    parser = argparse.ArgumentParser(description="What a bucket costs a large fleet.")
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW")
    for name in ("workers", "builders"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("start_s", "build_s", "run_s", "missed_s", "limit_s"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = vars(parser.parse_args())
    out, names = given.pop("out"), given.pop("rows")
    changes = {name: value for name, value in given.items() if value is not None}
    logging.getLogger("warmgraph_backends").setLevel(logging.ERROR)
    begun, rows = time.monotonic(), {}
    for name in names:
        rows[name] = found = trial(replace(ROWS[name], **changes))
        shown = {key: value for key, value in found.items() if key != "row"}
        sys.stdout.write(f"{name}: {shown}\n")
        sys.stdout.flush()
    case = {
        "ok": not any(found["cold_at_the_end"] for found in rows.values()),
        "seconds": round(time.monotonic() - begun, 1),
        "meaning": "workers of one process, in real time; only the compiler is a stand-in. "
        "Workers that are warm end; a reader asks again when an image begins",
        "rows": rows,
    }
    write_case(out, "fleet_trial", case)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
