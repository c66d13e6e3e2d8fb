"""Server processes that share a store, for `test_claims.py`: `claims_server.py COUNT ROOT KINDS`.

Forks COUNT servers, each with a builder, workers and a loader of its own, that all want the same
kinds at once; each prints a line of JSON about what became of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if "warmgraph_backends" not in sys.modules:
    sys.path.insert(0, str(HERE.parents[1] / "backends" / "worker"))
    from main import adopt_package

    adopt_package()

from warmgraph_backends.building.builder import Builder  # noqa: E402
from warmgraph_backends.building.claims import Claims  # noqa: E402
from warmgraph_backends.contract import Compiled, RegionSpec, Requirement  # noqa: E402
from warmgraph_backends.events import Events  # noqa: E402
from warmgraph_backends.graphs.compiled_graph import CompiledGraph  # noqa: E402
from warmgraph_backends.graphs.library import Graphs  # noqa: E402
from warmgraph_backends.storing.signing import Signer  # noqa: E402
from warmgraph_backends.storing.store import Store  # noqa: E402


class Echo:
    """A backend whose graphs say what they are."""

    name = "echo"

    def requirements(self, device: str) -> Sequence[Requirement]:
        return ()

    def needs_to_build(self, device: str) -> Sequence[Requirement]:
        """Need nothing for builds either."""
        return ()

    def fingerprint(self, device: str) -> dict[str, Any]:
        return {}

    def compile(self, program: Any, *, measure: Any) -> Compiled:
        raise NotImplementedError("the worker of these tests builds without it")

    def load(self, payload: bytes, card: int | None = None) -> Callable[[list[Any]], Any]:
        return lambda _: payload


def describe(kind: str) -> tuple[RegionSpec, Echo, dict[str, Any]]:
    """What `Graphs.graph` takes for a kind without layers."""
    module = {"class": kind, "parameters": {}, "modules": []}
    description = RegionSpec("test", "form", kind, module, (), (), device="cpu")
    return description, Echo(), {"device": "cpu"}


class Server:
    """One server: what the engine has, without a host."""

    def __init__(self, root: Path, *, patience_s: float = 60.0, **hello: Any) -> None:
        signer = Signer(root / "private")
        self.store = Store(
            root / "store", signer, cap_bytes=lambda: 1 << 30, private=root / "private"
        )
        self.builder = Builder(
            hello={"roll": str(root / "roll"), "seconds": 0.2, **hello},
            spool=self.store.spool,
            workers=lambda: 1,
            time_limit_s=lambda: 60.0,
            script=HERE / "claims_worker.py",
        )
        self.claims = Claims(self.store.root, signer, patience_s=lambda: patience_s)
        self.graphs = Graphs(self.store, self.builder, self.claims, Events())

    def want(self, kinds: Sequence[str]) -> list[CompiledGraph]:
        """Have these kinds loaded or built."""
        wanted = []
        for kind in kinds:
            wanted.append(self.graphs.graph(*describe(kind)))
        self.graphs.request(wanted, [], build=True)
        return wanted

    def close(self) -> None:
        self.builder.close()
        self.graphs.close()


def settle(graphs: Sequence[CompiledGraph], seconds: float = 120.0) -> list[str]:
    """Wait until none is on its way; returns the states."""
    until = time.monotonic() + seconds
    while any(graph.is_pending for graph in graphs) and time.monotonic() < until:
        time.sleep(0.01)
    return [graph.state.value for graph in graphs]


def main(count: int, root: Path, kinds: Sequence[str]) -> None:
    """Be several servers."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            server = Server(root, patience_s=600.0)
            graphs = server.want(kinds)
            states = settle(graphs)
            said = [graph.loaded.call([]).decode() if graph.loaded else "" for graph in graphs]
            facts = {"states": states, "said": said, "builds": server.graphs.builds}
            server.close()
            os.write(1, json.dumps(facts).encode() + b"\n")
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
