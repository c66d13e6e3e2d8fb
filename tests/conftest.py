"""Shared fixtures: the pack's packages under an alias, and the real host inside this process.

How the suite shares graphs: a run has one folder that all of its processes know (`run_folder`), and
in it the lab of tests/engine, whose store and signing key the engines over it share, as servers of
one user directory do. The first process that needs it builds the graphs of a narrow SDXL there,
others wait and load them. `make_lab` copies that store for tests that change it or count, less the
kinds that a test has built for real, or starts with an empty one; `start_server(lend=...)` copies
those graphs and the key to a server. Small transformers have a store of their own in that folder,
which the server of their workflows fills, too (`pass_transformers`). Keys hold the sources' hashes,
so a graph that fits is the right one, and what an earlier run kept is lent as well. The files that
take longest come first (`durations.json`), so that no process is left without work. In any other
order, or alone, the same is shown and more is built.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from filelock import FileLock  # torch needs it, too

ROOT = Path(__file__).resolve().parents[1]

#: What runs on other hosts and other torches (`dev test --host ... --torch ...`), in about five
#: minutes: files or folders, and what a test's name there must hold one of, if not all count.
QUICK: dict[str, tuple[str, ...]] = {
    "unit": (),
    "compile": (),
    "engine/test_background.py": (),
    "engine/test_fresh_process.py": (),
    "engine/test_no_rebuild.py": (),
    "engine/test_other_torch.py": (),
    "engine/test_region.py": (),
    "host/test_workflows.py": ("imports", "text_to_image"),
}

#: Of random numbers; none that tests give to generators of their own, which would draw the same.
SEED = 20817

# Spares workers most trials of the CPU's vector instructions, which each folder of theirs needs.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# torch's threads sleep while they wait for one another: on a machine that others share, those that
# spin make a test of one second take thirty. It has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


sys.path.insert(0, str(ROOT / "dev" / "tools"))
from by_path import load_ours  # noqa: E402

sys.path.pop(0)
load_ours("backends", "console", "tools")

from warmgraph_tools import checkpoints, compiler_facts, durations, frontends, inprocess  # noqa: E402
from warmgraph_tools.host import Server  # noqa: E402
from warmgraph_tools.inprocess import Host  # noqa: E402
from warmgraph_tools.install import prepare_base  # noqa: E402
from warmgraph_tools.kept_graphs import STORE, VARIABLE, keeping, pass_on  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--frontend",
        metavar="VERSION",
        help="serve the page of this version of comfyui-frontend-package, which is downloaded"
        " once, or of the newest; without it the one that is installed",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick half, and put the files that take longest first."""

    seconds = durations.recorded()
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(ROOT / "tests").as_posix(), 0))
    for item in items:
        path = item.path.relative_to(ROOT / "tests")
        for part in (path, *path.parents):
            words = QUICK.get(part.as_posix())
            if words is not None and (not words or any(word in item.name for word in words)):
                item.add_marker("quick")


def _seed() -> None:
    import numpy
    import torch

    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(SEED)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws without a seed of its own is the same after any other test, anywhere."""
    _seed()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """So is what a fixture of several tests draws, whichever test has it made, and when."""
    if fixturedef.scope == "function":
        return (yield)
    import numpy
    import torch

    ours, theirs = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            _seed()
            return (yield)
    finally:
        numpy.random.set_state(theirs)
        random.setstate(ours)


def find_host_tree() -> Path | None:
    """The ComfyUI tree that `python dev` made, or WARMGRAPH_HOST names; None when there is none."""
    named = os.environ.get("WARMGRAPH_HOST")
    tree = Path(named) if named else ROOT / ".host" / "0.30.0"
    return tree.resolve() if (tree / "main.py").is_file() else None


@pytest.fixture(scope="session")
def host_tree() -> Path:
    """Path of the real ComfyUI tree."""
    tree = find_host_tree()
    if tree is None:
        pytest.skip("no ComfyUI tree: run `python dev test`, or set WARMGRAPH_HOST to one")
    return tree


@pytest.fixture(scope="session")
def host(host_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The real host imported into this process: CPU, GPUs' kind of attention, all core nodes."""
    argv = sys.argv
    base = tmp_path_factory.mktemp("comfy")
    try:
        yield inprocess.boot(host_tree, base)
    finally:
        sys.argv = argv


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of a real S3 server in this process. It answers one request at a time: it looks
    whether a name is taken and writes it in two steps, which S3 itself does in one.
    """
    for package in ("s3fs", "moto", "flask"):
        pytest.importorskip(package, reason="a development tool is not installed")
    from moto.moto_server import werkzeug_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)
    turn = threading.Lock()

    def answer(environ: Any, start_response: Any) -> list[bytes]:
        with turn:
            return list(moto(environ, start_response))

    handler = werkzeug_app.MotoRequestHandler
    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class InstallPack(Protocol):
    """Put a pack into the host's custom nodes and import it as the host does."""

    def __call__(self, name: str, files: dict[str, str]) -> Path: ...


@pytest.fixture
def install_pack(host: Host) -> Iterator[InstallPack]:
    """`install_pack(name, {path: text})`: returns its folder. Afterwards the packs are gone, and
    what they put into the host's and torch's places is put back.
    """
    import comfy.ldm.modules.attention as attention
    import torch

    places: list[tuple[Any, str]] = [
        (attention.BasicTransformerBlock, "forward"),
        (attention.SpatialTransformer, "forward"),
        (attention, "optimized_attention"),
        (torch.nn.functional, "scaled_dot_product_attention"),
        (torch.nn.functional, "gelu"),
        (torch.nn.GroupNorm, "forward"),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name in places]
    modules, folders = set(sys.modules), []

    def install(name: str, files: dict[str, str]) -> Path:
        folder = host.base / "custom_nodes" / name
        folders.append(folder)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, "utf-8")
        assert asyncio.run(host.nodes.load_custom_node(str(folder)))
        return folder

    yield install
    for owner, attribute, value in before:
        setattr(owner, attribute, value)
    for module in [m for m in sys.modules if m not in modules]:
        if any(module.startswith(str(folder)) for folder in folders):
            del sys.modules[module]
    for folder in folders:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of the suite, the same one in all of its processes."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _shared_compiler_facts(run_folder: Path) -> Iterator[None]:
    """Workers try the C++ compiler out once in a run, not once for each server and engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiler_facts.VARIABLE, str(run_folder / "compiler"))
        yield


class PassTransformers(Protocol):
    """Give a server's base folder the graphs of small transformers that this run has built; or back
    to others what it has built of them.
    """

    def __call__(self, base: Path, *, back: bool = False) -> None: ...


@pytest.fixture(scope="session")
def transformers_store(run_folder: Path) -> Iterator[tuple[Path, FileLock]]:
    """Where all processes of a run keep graphs of small transformers, and what to hold when one
    makes or fills it.
    """
    root = run_folder / "transformers"
    with keeping(root):
        yield root, FileLock(run_folder / "transformers.lock")


@pytest.fixture(scope="session")
def pass_transformers(transformers_store: tuple[Path, FileLock]) -> PassTransformers:
    root, lock = transformers_store

    def both_ways(base: Path, *, back: bool = False) -> None:
        with lock:
            pass_on(base, root) if back else pass_on(root, base)

    return both_ways


class BuiltOnce:
    """The graphs of a narrow SDXL, which the first process of a run builds, or an earlier run did:
    one of other code has other keys, and lends nothing that fits.
    """

    def __init__(self, folder: Path) -> None:
        #: Held while they are built.
        self.lock = FileLock(folder / "lab.lock")
        kept = os.environ.get(VARIABLE)
        self._lists = [folder / "lab.json", *([Path(kept, "lab", "lab.json")] if kept else [])]

    def note(self, root: Path, keys: Sequence[str]) -> None:
        """Let servers be lent these graphs of the engine with the folders below `root`."""
        for file, home in zip(self._lists, (root, self._lists[-1].parent), strict=False):
            file.write_text(json.dumps({"root": str(home), "keys": list(keys)}), "utf-8")

    def lend(self, base: Path, *, without: int = 0) -> None:
        """Copy the graphs and what signed them to a server's folders; nothing if there are none.

        Args:
            without: how many of them are left for the server to build, the quickest to build.
        """
        with self.lock:
            found = next((file for file in self._lists if file.is_file()), None)
            if found is None:
                return
            built = json.loads(found.read_text("utf-8"))
        root = Path(built["root"])
        files = {key: root / STORE / f"{key}.safetensors" for key in built["keys"]}
        sizes = {key: file.stat().st_size for key, file in files.items() if file.is_file()}
        pass_on(root, base, sorted(sizes, key=sizes.__getitem__)[without:])


@pytest.fixture(scope="session")
def built_once(run_folder: Path) -> BuiltOnce:
    return BuiltOnce(run_folder)


@pytest.fixture(scope="session")
def page_flags(pytestconfig: pytest.Config, run_folder: Path) -> tuple[str, ...]:
    """What a server is started with for the page that `--frontend` names."""
    version = pytestconfig.getoption("--frontend")
    if not version:
        return ()
    with FileLock(run_folder / "frontend.lock"):
        return ("--front-end-root", str(frontends.frontend_root(version)))


@pytest.fixture(scope="session")
def start_server(
    host_tree: Path,
    built_once: BuiltOnce,
    page_flags: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Server]]:
    """Start real servers with the pack installed; all that still run are stopped at the end.

    `start_server(base=None, flags=("--cpu",), pack=True, narrow=True, environment=None,
    lend=None)`: a fresh base directory unless one is given; `Server.restart()` keeps it. With
    `lend` its store has what this run has built for a narrow SDXL, less as many graphs.
    """
    started: list[Server] = []

    def start(
        base: Path | None = None,
        *,
        pack: bool = True,
        narrow: bool = True,
        lend: int | None = None,
        flags: Sequence[str] = ("--cpu",),
        **options: Any,
    ) -> Server:
        base = prepare_base(
            base or tmp_path_factory.mktemp("base"), host_tree, pack=pack, narrow=narrow
        )
        if lend is not None:
            built_once.lend(base, without=lend)
        compiler_facts.share(base / "user" / "__warmgraph")
        server = Server(host_tree, base, flags=(*flags, *page_flags), **options)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Server]) -> Server:
    """One server that all tests share: leave it running, and no setting changed."""
    return start_server(lend=0)


class PlaceModel(Protocol):
    """Write a model file where a server finds it; returns the name that its loaders take."""

    def __call__(
        self,
        server: Server,
        kind: str,
        *,
        name: str | None = None,
        seed: int = 0,
        base: str | None = None,
    ) -> str: ...


@pytest.fixture(scope="session")
def place_model(host: Host) -> PlaceModel:
    """`place_model(server, kind, name=..., seed=..., base=...)`; kinds in `checkpoints.FOLDERS`."""

    def place(
        server: Server,
        kind: str,
        *,
        name: str | None = None,
        seed: int = 0,
        base: str | None = None,
    ) -> str:
        models = server.base / "models"
        return checkpoints.ensure(models, kind, seed=seed, base=base, name=name).name

    return place
